"""What tasks over rows of a data set have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from expert_iteration.config.task_defaults import REWARD_WEIGHTS
from expert_iteration.tasks.base import SPLITS, check_prompt_template, with_default_options
from expert_iteration.tasks.reward_mix import RewardMix
from expert_iteration.tasks.row_files import DataSource, ParsedRow, Rows, load_rows
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

    @abstractmethod
    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Each task's own."""

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


class ComponentTask(RowTask):
    """A task over a published data set, whose graded reward is a weighted mean of named components.

    A subclass says where its rows come from and what is in them, and scores responses.
    """

    name: str
    hub_name: str
    hub_config: str | None = None
    default_template: str
    way_out: str
    """What a row has to look like, for rows that do not."""

    def __init__(
        self,
        *,
        data_path: str | None = None,
        options: Mapping[str, Any] | None = None,
        prompt_template: str | None = None,
        reward: str = "exact",
        reward_weights: Mapping[str, Any] | None = None,
        train_size: int | None = None,
        test_size: int | None = None,
        drop_invalid: bool = False,
    ) -> None:
        """Reads and checks all rows. Raises UserError for unusable files, rows, options, sizes or prompt template."""
        self._template = prompt_template or self.default_template
        check_prompt_template(self._template)
        self._read_options(with_default_options(self.name, options or {}))
        self._mix = RewardMix(REWARD_WEIGHTS[self.name], reward_weights or {})
        self._graded = reward == "graded"
        path = Path(data_path) if data_path else None
        source = DataSource(path, self.hub_name, self.hub_config, "env.data_path", self.way_out)
        sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        rows = load_rows(source, self._parse_row, sizes, drop_invalid=drop_invalid)
        super().__init__(rows, drop_invalid=drop_invalid)

    @abstractmethod
    def _read_options(self, options: Mapping[str, Any]) -> None:
        """Takes the options, all of them given. Raises UserError for values that cannot be."""

    @abstractmethod
    def _parse_row(self, record: dict[str, Any]) -> ParsedRow:
        """Raises RowError for a row that cannot be used."""
