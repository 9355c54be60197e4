"""Problems that reasoning_gym generates and scores (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import sympy
from reasoning_gym.dataset import ProceduralDataset

from expert_iteration.config.derived import SLOW_SCORERS
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
from expert_iteration.tasks.generator_mix import Source, read_sources, shares
from expert_iteration.tasks.generator_options import build_generator, options_error
from expert_iteration.tasks.response_guard import may_be_scored
from expert_iteration.tasks.self_check import Failure, check_answers, settle
from expert_iteration.tasks.verifier_pool import InProcessVerifier
from expert_iteration.types import Prompt, Score, ScoreMany, Split

PROMPT_TEMPLATE = "{question}\nGive the final answer between <answer> and </answer>."
DEFAULT_SIZES: dict[Split, int] = {"train": 10_000, "test": 500}
CHUNK_SIZE = 1000
"""Item i of a generator is made from seed + i, so chunks whose seeds lie this far apart share nothing. Some generators
prepare all their items at once, so a chunk must not be large."""
PATIENCE = 1000
"""Draws without a new question, at least, before a generator counts as exhausted."""
MAX_SLOW_NEGATIVES = 200
"""Rows that the self-check tries with wrong answers where a score takes seconds."""
NEAR_MISS_MARKS = 0.5
MAX_RELATIVE_ERROR = Fraction(1, 100)
"""Of a number that a scorer takes for right: some tolerate an absolute error that is larger than the gold itself."""

# fmt: off
NUMBER_GENERATORS = frozenset(
    {"advanced_geometry", "aiw", "basic_arithmetic", "binary_alternation", "calendar_arithmetic", "chain_sum",
     "circuit_logic", "coin_flip", "count_bits", "count_primes", "decimal_arithmetic", "decimal_chain_sum", "dice",
     "fraction_simplification", "gcd", "gsm_symbolic", "largest_island", "lcm", "leg_counting", "letter_counting",
     "maze", "number_format", "number_sequence", "power_function", "products", "rectangle_count", "rotten_oranges",
     "self_reference", "simple_equations", "simple_geometry"}
)
# fmt: on
"""Generators whose answer is a number, if it looks like one. Of others it may be a matrix or a list with one number in
it, and then a longer one that ends in that number is wrong."""
_NUMERIC_GOLD = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:e[-+][0-9]+|/[0-9]+)?")
_ANSWER_LABEL = re.compile(r"answer\**\s*:\**", re.IGNORECASE)
# Some of its programs draw at random, so that nobody can say what they print.
_RUNS_PROGRAMS = frozenset({"codeio"})
# Its own scorer takes any text that is not empty for the right answer.
_COMPARED_AS_TEXT = frozenset({"game_of_life_halting"})


@dataclass(frozen=True, slots=True)
class Row:
    """One generated item."""

    source: int
    """Index of the source that it comes from."""
    entry: Mapping[str, Any]
    """The item as its generator made it: question, answer and metadata."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What drawing a source's rows of a split came to."""

    rows: list[Row]
    """Distinct by question."""
    num_questions: int
    """Distinct questions seen, of both splits."""
    num_draws: int
    """Items generated."""


class ReasoningGym:
    """One generator, or a mix of several, with its reward; docs/rewards.md states both.

    The held-out questions follow from the generators' options and `env.options.data_seed` alone; the training questions
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
        self._data_seed = _check_data_seed(options.get("data_seed", 0))
        self._sources = read_sources({key: value for key, value in options.items() if key != "data_seed"})
        self._scorers = _build_scorers(self._sources)
        seeds: dict[Split, int] = {"train": seed, "test": self._data_seed}
        sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        wanted = self._shares(sizes)
        draws = {split: self._draw_all(split, seeds[split], wanted[split]) for split in SPLITS}
        self._check_sizes(sizes, wanted, draws)
        test, train = (_interleave(draws[split], _stream_seed(split, seeds[split])) for split in ("test", "train"))
        self._rows = test + train
        prompts = [
            Prompt(row_id, render_prompt(self._template, question), row.entry["answer"], question)
            for row_id, row in enumerate(self._rows)
            for question in (row.entry["question"],)
        ]
        self._prompts: dict[Split, list[Prompt]] = {"train": prompts[len(test) :], "test": prompts[: len(test)]}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_scorers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Builds the scorers anew: some hold functions that no other process could be given."""
        vars(self).update(state)
        self._scorers = _build_scorers(self._sources)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split, distinct by question within it and across both; those of several generators alternate at
        random."""
        return self._prompts[split]

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]; None when the generator's scorer fails on the response."""
        row = self._rows[prompt.row_id]
        gold, text = row.entry["answer"], strip_reasoning(response_text)
        asks_for_number = self._generator_of(row) in NUMBER_GENERATORS and _NUMERIC_GOLD.fullmatch(gold.strip())
        marks = self._score_number(row, text) if asks_for_number else self._score_text(row, text)
        success, graded = marks or (0.0, 0.0)
        details = {"success": success}
        if len(self._sources) > 1:
            details[f"success.{self._sources[row.source].label}"] = success
        if marks is None:
            return Score(None, details)
        return Score(graded if self._graded else success, details | {"graded": graded})

    def self_check(self, score_many: ScoreMany | None = None) -> None:
        """Raises UserError, or drops rows, unless every gold answer scores 1 and an empty or wrong one does not.

        Five generators have no gold answer, only a scorer: their rows are tried with an empty response alone.
        """
        score_many = score_many or InProcessVerifier(self.score).score_many
        prompts = [prompt for split in SPLITS for prompt in self.prompts(split)]
        failures: list[Failure] = []
        for index, source in enumerate(self._sources):
            own = [prompt for prompt in prompts if self._rows[prompt.row_id].source == index]
            max_negatives = MAX_SLOW_NEGATIVES if source.generator in SLOW_SCORERS else None
            failures += check_answers(own, score_many, str, max_negatives=max_negatives)
        self._prompts = settle(self._prompts, failures, drop=self._drop_invalid)

    def _score_number(self, row: Row, text: str) -> tuple[float, float] | None:
        """Exact and graded mark of a response to a question whose gold answer is a number."""
        gold = row.entry["answer"].strip()
        answer = extract_answer(text)
        if answer is None or parse_number(answer) is None:
            return 0.0, 0.0
        own_score = self._own_score(row, answer)
        if own_score is None:
            return None
        # Where a fraction is asked for, or given, an equal value may be the question itself: 158/346 simplified.
        is_fraction = "/" in gold or "/" in answer
        if (own_score == 1.0 and _is_near(answer, gold)) or (not is_fraction and answers_match(answer, gold)):
            return 1.0, 1.0
        return 0.0, NEAR_MISS_MARKS * closeness(answer, gold)

    def _score_text(self, row: Row, text: str) -> tuple[float, float] | None:
        """Exact and graded mark of a response to any other question: the generator's own."""
        own_score = self._own_score(row, answer_text(text))
        return None if own_score is None else (float(own_score == 1.0), own_score)

    def _own_score(self, row: Row, answer: str) -> float | None:
        """The generator's score; None when its scorer fails or leaves [0, 1]."""
        generator, entry = self._generator_of(row), row.entry
        if generator in _COMPARED_AS_TEXT:
            return float(answer.strip().casefold() == entry["answer"].casefold())
        if not may_be_scored(generator, answer):
            return 0.0
        try:
            score = float(self._scorers[row.source].score_answer(answer, entry))
        except Exception:  # scorers fail on unforeseen responses in ways of their own
            return None
        if generator == "puzzle24" and score == 1.0 and not _makes_24(entry, answer):
            return 0.0
        return score if math.isfinite(score) and 0.0 <= score <= 1.0 else None

    def _generator_of(self, row: Row) -> str:
        """The generator that made a row; `composite` draws from several."""
        return str(row.entry["metadata"].get("source_dataset", self._sources[row.source].generator))

    def _shares(self, sizes: Mapping[Split, int | None]) -> dict[Split, list[int]]:
        """Rows of each split from each source. Raises UserError when there are none from one of them."""
        weights = [source.weight for source in self._sources]
        wanted = {split: shares(sizes[split] or DEFAULT_SIZES[split], weights) for split in SPLITS}
        problems = [
            Problem(
                f"{source.key}.weight",
                source.weight,
                f"its share of env.{split}_size={sizes[split] or DEFAULT_SIZES[split]} is less than one row",
                f"raise env.{split}_size or this weight, or remove the generator",
            )
            for split in SPLITS
            for source, number in zip(self._sources, wanted[split], strict=True)
            if number == 0
        ]
        if problems:
            raise UserError(*problems)
        return wanted

    def _draw_all(self, split: Split, seed: int, wanted: Sequence[int]) -> list[Draw]:
        """A split's rows from each source, distinct by question over all of them."""
        seen: set[str] = set()
        return [self._draw(split, seed, index, size, seen) for index, size in enumerate(wanted)]

    def _draw(self, split: Split, seed: int, source: int, size: int, seen: set[str]) -> Draw:
        """A split's rows from one source, until there are enough of them or no new questions come.

        Adds the questions to `seen`, and passes over those that are in it.
        """
        rows: list[Row] = []
        num_draws = last_new = num_new = 0
        items = self._items(self._sources[source], _stream_seed(split, seed, source))
        while len(rows) < size and num_draws - last_new <= max(PATIENCE, 4 * len(seen)):
            row = Row(source, next(items))
            question = row.entry["question"]
            num_draws += 1
            key = question_key(question)
            if key in seen or not self._is_usable(row):
                continue
            seen.add(key)
            num_new += 1
            last_new = num_draws
            if is_held_out(question, self._data_seed) == (split == "test"):
                rows.append(row)
        return Draw(rows, num_new, num_draws)

    def _is_usable(self, row: Row) -> bool:
        """False where saying nothing is right (`ab`, `rubiks_cube`) or the question is (`intermediate_integration`)."""
        gold = row.entry["answer"]
        gold_is_answer = gold is None or may_be_scored(self._generator_of(row), gold)
        return gold_is_answer and self._own_score(row, "") != 1.0

    def _items(self, source: Source, first_seed: int) -> Iterator[dict[str, Any]]:
        """The items of a source's generator without end."""
        for seed in itertools.count(first_seed, CHUNK_SIZE):
            chunk = build_generator(source.generator, source.options, source.key, seed=seed, size=CHUNK_SIZE)
            for index in range(CHUNK_SIZE):
                try:
                    entry = _generate(chunk, index, seed + index)
                    is_random = entry["metadata"].get("source_dataset") in _RUNS_PROGRAMS and (
                        _generate(chunk, index, seed + index + 1) != entry
                    )
                except Exception as error:  # the generator's own check lets some impossible options pass
                    complaint = f"it fails to generate with them ({type(error).__name__}: {error})"
                    raise options_error(source.generator, source.options, source.key, complaint) from error
                if not is_random:
                    yield entry

    def _check_sizes(
        self,
        sizes: Mapping[Split, int | None],
        wanted: Mapping[Split, Sequence[int]],
        draws: Mapping[Split, Sequence[Draw]],
    ) -> None:
        """Raises UserError unless each source had enough questions for its share of each split."""
        total = sum(Fraction(source.weight) for source in self._sources)
        problems = [
            Problem(
                f"env.{split}_size",
                sizes[split] or f"(blank: {DEFAULT_SIZES[split]})",
                f"{source.label} has only {len(draw.rows)} distinct questions for this split with these options "
                f"({draw.num_questions} for both in {draw.num_draws} draws)"
                + (f", and its share is {number}" if len(self._sources) > 1 else ""),
                f"set env.{split}_size to at most {math.floor(len(draw.rows) * total / Fraction(source.weight))}, "
                f"or change {source.key} so that there are more",
            )
            for split in SPLITS
            for source, number, draw in zip(self._sources, wanted[split], draws[split], strict=True)
            if len(draw.rows) < number
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


def _build_scorers(sources: Sequence[Source]) -> list[Any]:
    """A data set of each source's generator, for its scorer."""
    return [build_generator(source.generator, source.options, source.key, seed=0, size=1) for source in sources]


def _is_near(answer: str, gold: str) -> bool:
    value, gold_value = parse_number(answer), parse_number(gold)
    assert value is not None and gold_value is not None
    return abs(value - gold_value) <= MAX_RELATIVE_ERROR * abs(gold_value)


def _makes_24(entry: Mapping[str, Any], answer: str) -> bool:
    """Whether an expression that the generator's scorer takes for right has the puzzle's four numbers, for which that
    does not ask, and is 24: it takes 24.5 for that."""
    numbers = sorted(int(number) for number in re.findall(r"[0-9]+", answer))
    return numbers == sorted(entry["metadata"]["numbers"]) and bool(sympy.parse_expr(answer) == 24)


def _generate(chunk: ProceduralDataset, index: int, seed: int) -> dict[str, Any]:
    """One item of a generator, the same for the same seed."""
    with _global_random(seed):
        item: dict[str, Any] = chunk[index]
    return item


@contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Seeds the global generators of `random` and NumPy, from which `codeio` and `list_functions` draw as well, and
    leaves them as they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _interleave(draws: Sequence[Draw], seed: int) -> list[Row]:
    """All rows, each source's in their order, in an order of the sources that the seed decides."""
    order = [index for index, draw in enumerate(draws) for _ in draw.rows]
    random.Random(seed).shuffle(order)
    rows = [iter(draw.rows) for draw in draws]
    return [next(rows[index]) for index in order]


def _stream_seed(split: Split, seed: int, source: int = 0) -> int:
    """Seed of a split's first item from a source, far from any other: neighbouring seeds share nearly all items."""
    text = f"{split} {seed}" if source == 0 else f"{split} {seed} {source}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") // 2


def _check_data_seed(data_seed: Any) -> int:
    if isinstance(data_seed, bool) or not isinstance(data_seed, int) or data_seed < 0:
        constraint = "has to be a whole number of at least 0"
        raise UserError(Problem("env.options.data_seed", data_seed, constraint, "give such a number or leave it out"))
    return data_seed
