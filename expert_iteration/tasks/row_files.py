"""Prompts from rows of any columns: JSON Lines and Parquet files, or a data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.base import MAX_REPORTED_ROWS, SPLITS, is_held_out, question_key
from expert_iteration.tasks.qa_files import Unreadable, read_records, split_files
from expert_iteration.types import Prompt, Split


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """What a task makes of one row."""

    question: str
    """The text that tells questions apart, and that decides on the split where the data has none."""
    messages: tuple[dict[str, str], ...]
    gold: Any


class RowError(ValueError):
    """Says what a row has to be, as a sentence without a full stop."""


def load_prompts(
    source: Path | tuple[str, str | None],
    parse: Callable[[dict[str, Any]], ParsedRow],
    sizes: dict[Split, int | None],
) -> dict[Split, list[Prompt]]:
    """The prompts of both splits; row ids are positions in the data, training rows first.

    A folder or a data set of the hub (name, configuration) with a test split keeps its splits; of anything else a fifth
    of the questions is held out by a hash of their text. Rows that say the same are taken once, and a training row
    whose question is held out is dropped. UserError names up to 20 rows that `parse` refuses with RowError.
    """
    train, test = _read_path(source) if isinstance(source, Path) else _read_hub(*source)
    rows = _parse(train + test, parse)
    questions = [question_key(row.question) for row in rows]
    if test:
        held_out = set(questions[len(train) :])
    else:
        held_out = {key for key, row in zip(questions, rows, strict=True) if is_held_out(row.question, 0)}
    prompts: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
    seen = set()
    for index, (key, row) in enumerate(zip(questions, rows, strict=True)):
        is_test = index >= len(train) if test else key in held_out
        identity = (is_test, key, json.dumps(row.gold, sort_keys=True, default=str))
        if identity in seen or (not is_test and key in held_out):
            continue
        seen.add(identity)
        prompts["test" if is_test else "train"].append(Prompt(index, row.messages, row.gold))
    _check_sizes(prompts, sizes)
    return {split: prompts[split][: sizes[split]] for split in SPLITS}


def _parse(records: Sequence[tuple[str, Any]], parse: Callable[[dict[str, Any]], ParsedRow]) -> list[ParsedRow]:
    rows, problems = [], []
    for place, record in records:
        try:
            if not isinstance(record, dict):
                raise RowError("has to be a JSON object")
            rows.append(parse(record))
        except RowError as error:
            shown = record.line if isinstance(record, Unreadable) else record
            problems.append(Problem(place, repr(shown)[:100], str(error), "repair or remove the row"))
    if problems:
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    return rows


def _read_path(path: Path) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Rows of the training and the test files, each with its place; all are training rows where there is one file."""
    if path.is_dir():
        files = {split: split_files(path, split) for split in SPLITS}
        if not files["train"]:
            raise UserError(_no_rows(path, "has no train.jsonl and no train.parquet"))
    elif path.is_file():
        files = {"train": [path], "test": []}
    else:
        raise UserError(_no_rows(path, "does not exist"))
    rows = {
        split: [
            (f"{file} row {number}", row) for file in files[split] for number, row in enumerate(read_records(file), 1)
        ]
        for split in SPLITS
    }
    empty = [split for split in SPLITS if files[split] and not rows[split]]
    if empty:
        raise UserError(_no_rows(path, f"has no rows for {' and '.join(empty)}"))
    return rows["train"], rows["test"]


def _read_hub(name: str, config: str | None) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    import datasets

    try:
        data = datasets.load_dataset(name, config)
    except Exception as error:  # a lack of network shows itself in many types
        complaint = f"cannot be loaded from the hub ({type(error).__name__}: {str(error)[:200]})"
        way_out = "connect to the network, correct the name, or give files in env.data_path"
        raise UserError(Problem("data set", name, complaint, way_out)) from error
    splits = {
        split: [(f"{name} {split} row {number}", row) for number, row in enumerate(data[split], 1)]
        if split in data
        else []
        for split in SPLITS
    }
    if not splits["train"]:
        raise UserError(Problem("data set", name, "has no rows in a split named train", "give files in env.data_path"))
    return splits["train"], splits["test"]


def _check_sizes(prompts: dict[Split, list[Prompt]], sizes: dict[Split, int | None]) -> None:
    problems = [
        Problem(
            f"env.{split}_size",
            "(blank)" if sizes[split] is None else sizes[split],
            f"the data has {len(prompts[split])} distinct rows in this split, and at least one is needed",
            f"set env.{split}_size to at most {len(prompts[split])}, or give more data",
        )
        for split in SPLITS
        if len(prompts[split]) < (sizes[split] or 1)
    ]
    if problems:
        raise UserError(*problems)


def _no_rows(path: Path, what: str) -> Problem:
    way_out = "give a folder with train.jsonl and test.jsonl (or .parquet), or one such file"
    return Problem("env.data_path", path, what, way_out)
