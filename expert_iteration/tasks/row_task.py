"""What tasks over rows of a data set have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from expert_iteration.tasks.base import SPLITS
from expert_iteration.tasks.row_files import Rows
from expert_iteration.tasks.self_check import Failure, check_answers, settle
from expert_iteration.tasks.verifier_pool import InProcessVerifier
from expert_iteration.types import Prompt, Score, ScoreMany, Split


class RowTask:
    """Prompts from rows, with the counts of those left out: `num_duplicates`, `num_held_out` and `num_invalid`."""

    def __init__(self, rows: Rows, *, drop_invalid: bool) -> None:
        self._prompts = rows.prompts
        self._drop_invalid = drop_invalid
        self.num_duplicates = rows.num_duplicates
        self.num_held_out = rows.num_held_out
        self.num_invalid = rows.num_invalid

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows: a process that scores gets each prompt with its response."""
        return self.__dict__ | {"_prompts": {split: [] for split in SPLITS}}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split, in the order of the data. No question stands in both splits."""
        return self._prompts[split]

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Each task's own."""
        raise NotImplementedError

    def _check_answers(
        self,
        score_many: ScoreMany | None,
        response_with: Callable[[str], str],
        *,
        gold_of: Callable[[Prompt], str | None] = lambda prompt: prompt.gold,
        max_negatives: int | None = None,
    ) -> None:
        """Drops rows, or raises UserError, unless every gold answer scores 1 and an empty or wrong one does not."""
        score_many = score_many or InProcessVerifier(self.score).score_many
        prompts = [prompt for split in SPLITS for prompt in self.prompts(split)]
        self._settle(check_answers(prompts, score_many, response_with, gold_of=gold_of, max_negatives=max_negatives))

    def _settle(self, failures: Sequence[Failure]) -> None:
        """Drops the rows that failed the self-check, or raises UserError that names them."""
        num_before = sum(map(len, self._prompts.values()))
        self._prompts = settle(self._prompts, failures, drop=self._drop_invalid)
        self.num_invalid += num_before - sum(map(len, self._prompts.values()))
