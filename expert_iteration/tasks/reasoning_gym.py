"""Problems that reasoning_gym generates and scores (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.answers import (
    answers_match,
    closeness,
    extract_answer,
    last_tagged_answer,
    parse_number,
    strip_reasoning,
)
from expert_iteration.tasks.base import (
    SPLITS,
    check_prompt_template,
    is_held_out,
    question_key,
    render_prompt,
)
from expert_iteration.tasks.generator_options import build_generator, check_generator, convert_options, options_error
from expert_iteration.tasks.response_guard import may_be_scored
from expert_iteration.tasks.self_check import check_answers, settle
from expert_iteration.tasks.verifier_pool import InProcessVerifier
from expert_iteration.types import Prompt, Score, ScoreMany, Split

PROMPT_TEMPLATE = "{question}\nGive the final answer between <answer> and </answer>."
DEFAULT_SIZES: dict[Split, int] = {"train": 10_000, "test": 500}
CHUNK_SIZE = 1000
"""Item i of a generator is made from seed + i, so chunks whose seeds lie this far apart share nothing. Some generators
prepare all their items at once, so a chunk must not be large."""
PATIENCE = 1000
"""Draws without a new question, at least, before a generator counts as exhausted."""
NEAR_MISS_MARKS = 0.5

_NUMERIC_GOLD = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:e[-+][0-9]+|/[0-9]+)?")
_ANSWER_LABEL = re.compile(r"answer\**\s*:\**", re.IGNORECASE)
# Its own scorer takes any text that is not empty for the right answer.
_COMPARED_AS_TEXT = frozenset({"game_of_life_halting"})


@dataclass(frozen=True, slots=True)
class Draw:
    """What drawing the items of a split came to."""

    entries: list[dict[str, Any]]
    """The split's items, distinct by question."""
    num_questions: int
    """Distinct questions seen, of both splits."""
    num_draws: int
    """Items generated."""


class ReasoningGym:
    """One generator with its reward; docs/rewards.md states both.

    The held-out questions follow from the generator's options and `env.options.data_seed` alone; the training questions
    follow from the run's seed, and are never among those that could be held out under the same data seed.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        *,
        options: Mapping[str, Any],
        prompt_template: str | None = None,
        reward: str = "exact",
        train_size: int | None = None,
        test_size: int | None = None,
        drop_invalid: bool = False,
        seed: int = 0,
    ) -> None:
        """Generates all rows. Raises UserError for a bad generator, option, size or prompt template."""
        self._template = prompt_template or PROMPT_TEMPLATE
        check_prompt_template(self._template)
        self._graded = reward == "graded"
        self._drop_invalid = drop_invalid
        self._generator = check_generator(options.get("generator"))
        self._data_seed = _check_data_seed(options.get("data_seed", 0))
        own_options = {key: value for key, value in options.items() if key not in ("generator", "data_seed")}
        self._options = convert_options(self._generator, own_options)
        self._scorer = build_generator(self._generator, self._options, seed=0, size=1)
        seeds: dict[Split, int] = {"train": seed, "test": self._data_seed}
        sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        draws = {split: self._draw(split, seeds[split], sizes[split] or DEFAULT_SIZES[split]) for split in SPLITS}
        self._check_sizes(sizes, draws)
        self._entries = draws["test"].entries + draws["train"].entries
        num_test = len(draws["test"].entries)
        prompts = [
            Prompt(row_id, render_prompt(self._template, entry["question"]), entry["answer"], entry["question"])
            for row_id, entry in enumerate(self._entries)
        ]
        self._prompts: dict[Split, list[Prompt]] = {"train": prompts[num_test:], "test": prompts[:num_test]}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split, distinct by question within it and across both."""
        return self._prompts[split]

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]; None when the generator's scorer fails on the response."""
        entry = self._entries[prompt.row_id]
        text = strip_reasoning(response_text)
        is_numeric = isinstance(entry["answer"], str) and _NUMERIC_GOLD.fullmatch(entry["answer"].strip()) is not None
        success_and_marks = self._score_number(entry, text) if is_numeric else self._score_text(entry, text)
        if success_and_marks is None:
            return Score(None, {"success": 0.0})
        success, graded = success_and_marks
        return Score(graded if self._graded else success, {"success": success, "graded": graded})

    def self_check(self, score_many: ScoreMany | None = None) -> None:
        """Raises UserError, or drops rows, unless every gold answer scores 1 and an empty or wrong one does not.

        Five generators have no gold answer, only a scorer: their rows are tried with an empty response alone.
        """
        score_many = score_many or InProcessVerifier(self.score).score_many
        prompts = [prompt for split in SPLITS for prompt in self.prompts(split)]
        failures = check_answers(prompts, score_many, str)
        self._prompts = settle(self._prompts, failures, drop=self._drop_invalid)

    def _score_number(self, entry: Mapping[str, Any], text: str) -> tuple[float, float] | None:
        """Exact and graded mark of a response to a question whose gold answer is a number."""
        gold = entry["answer"].strip()
        answer = extract_answer(text)
        if answer is None or parse_number(answer) is None:
            return 0.0, 0.0
        own_score = self._own_score(entry, answer)
        if own_score is None:
            return None
        # Where a fraction is asked for, or given, an equal value may be the question itself: 158/346 simplified.
        is_fraction = "/" in gold or "/" in answer
        if own_score == 1.0 or (not is_fraction and answers_match(answer, gold)):
            return 1.0, 1.0
        return 0.0, NEAR_MISS_MARKS * closeness(answer, gold)

    def _score_text(self, entry: Mapping[str, Any], text: str) -> tuple[float, float] | None:
        """Exact and graded mark of a response to any other question: the generator's own."""
        own_score = self._own_score(entry, answer_text(text))
        return None if own_score is None else (float(own_score == 1.0), own_score)

    def _own_score(self, entry: Mapping[str, Any], answer: str) -> float | None:
        """The generator's score; None when its scorer fails or leaves [0, 1]."""
        generator = self._generator_of(entry)
        if generator in _COMPARED_AS_TEXT:
            return float(answer.strip().casefold() == entry["answer"].casefold())
        if not may_be_scored(generator, answer):
            return 0.0
        try:
            score = float(self._scorer.score_answer(answer, entry))
        except Exception:  # scorers fail on unforeseen responses in ways of their own
            return None
        return score if math.isfinite(score) and 0.0 <= score <= 1.0 else None

    def _draw(self, split: Split, seed: int, size: int) -> Draw:
        """Items of a split, distinct by question, until there are enough of them or the generator has no new ones."""
        entries: list[dict[str, Any]] = []
        seen: set[str] = set()
        num_draws = last_new = 0
        items = self._items(_stream_seed(split, seed))
        while len(entries) < size and num_draws - last_new <= max(PATIENCE, 4 * len(seen)):
            entry = next(items)
            num_draws += 1
            key = question_key(entry["question"])
            if key in seen or not self._is_usable(entry):
                continue
            seen.add(key)
            last_new = num_draws
            if is_held_out(entry["question"], self._data_seed) == (split == "test"):
                entries.append(entry)
        return Draw(entries, len(seen), num_draws)

    def _is_usable(self, entry: Mapping[str, Any]) -> bool:
        """False where saying nothing is right (`ab`, `rubiks_cube`) or the question is (`intermediate_integration`)."""
        gold = entry["answer"]
        gold_is_answer = gold is None or may_be_scored(self._generator_of(entry), gold)
        return gold_is_answer and self._own_score(entry, "") != 1.0

    def _generator_of(self, entry: Mapping[str, Any]) -> str:
        """The generator that made an item; `composite` draws from several."""
        return str(entry["metadata"].get("source_dataset", self._generator))

    def _items(self, first_seed: int) -> Iterator[dict[str, Any]]:
        """The generator's items without end."""
        for seed in itertools.count(first_seed, CHUNK_SIZE):
            chunk = build_generator(self._generator, self._options, seed=seed, size=CHUNK_SIZE)
            for index in range(CHUNK_SIZE):
                try:
                    entry = chunk[index]
                except Exception as error:  # the generator's own check lets some impossible options pass
                    complaint = f"it fails to generate with them ({type(error).__name__}: {error})"
                    raise options_error(self._generator, self._options, complaint) from error
                yield entry

    def _check_sizes(self, sizes: Mapping[Split, int | None], draws: Mapping[Split, Draw]) -> None:
        problems = [
            Problem(
                f"env.{split}_size",
                sizes[split] or f"(blank: {DEFAULT_SIZES[split]})",
                f"{self._generator} has only {len(draw.entries)} distinct questions for this split with these options "
                f"({draw.num_questions} for both in {draw.num_draws} draws)",
                f"set env.{split}_size to at most {len(draw.entries)}, or change env.options so that there are more",
            )
            for split, draw in draws.items()
            if len(draw.entries) < (sizes[split] or DEFAULT_SIZES[split])
        ]
        if problems:
            raise UserError(*problems)


def answer_text(text: str) -> str:
    """The answer in a response to a question that does not ask for a number: the last complete `<answer>...</answer>`,
    else what follows the last "Answer:", else the whole text, without surrounding white space."""
    tagged = last_tagged_answer(text)
    if tagged is not None:
        return tagged
    labels = list(_ANSWER_LABEL.finditer(text))
    return text[labels[-1].end() :].strip() if labels else text.strip()


def _stream_seed(split: Split, seed: int) -> int:
    """Seed of a split's first item, far from that of any other seed: neighbouring seeds share nearly all items."""
    digest = hashlib.sha256(f"{split} {seed}".encode()).digest()
    return int.from_bytes(digest[:4], "big") // 2


def _check_data_seed(data_seed: Any) -> int:
    if isinstance(data_seed, bool) or not isinstance(data_seed, int) or data_seed < 0:
        constraint = "has to be a whole number of at least 0"
        raise UserError(Problem("env.options.data_seed", data_seed, constraint, "give such a number or leave it out"))
    return data_seed
