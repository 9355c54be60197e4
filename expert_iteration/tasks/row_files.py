"""Prompts from rows of any columns: JSON Lines and Parquet files, or a data set of the hub.

files or hub -> records with their places -> parse -> duplicates taken once -> split by text -> prompts
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.base import MAX_REPORTED_ROWS, SPLITS, check_sizes, is_held_out, question_key
from expert_iteration.types import Prompt, Split

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where rows come from, and what a user can do about rows that cannot be used."""

    path: Path | None
    hub_name: str | None
    """Data set of the hub, where there is no path."""
    hub_config: str | None
    key: str
    """The config key that chooses the data set of the hub."""
    way_out: str


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """What a task makes of one row."""

    question: str
    """The text that tells questions apart, and that decides on the split where the data has none."""
    messages: tuple[Mapping[str, str], ...]
    gold: Any
    identity: Any = None
    """Rows whose question and identity are equal are taken once."""
    key: int | str | None = None
    """The row's own id, which has to be unique and then decides on the split."""


class RowError(ValueError):
    """What is wrong with a row: each value that cannot be, and what it has to be, without a full stop."""

    def __init__(self, *breaches: tuple[Any, str]) -> None:
        super().__init__(*breaches)
        self.breaches = breaches


@dataclass(frozen=True, slots=True)
class Rows:
    """The prompts of both splits, and how many rows were left out."""

    prompts: dict[Split, list[Prompt]]
    num_duplicates: int
    """The same question with the same answer stood before."""
    num_held_out: int
    """Training rows whose question is held out."""
    num_invalid: int
    """Unusable rows that were dropped."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that is no JSON."""

    line: str


@dataclass(frozen=True, slots=True)
class _Record:
    """A row as it was read."""

    place: str
    """File and row, from 1."""
    is_test: bool
    """Whether it stands in a test split."""
    value: Any


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A usable row with its position in the data."""

    index: int
    is_test: bool
    row: ParsedRow


def load_rows(
    source: DataSource,
    parse: Callable[[dict[str, Any]], ParsedRow],
    sizes: Mapping[Split, int | None],
    *,
    drop_invalid: bool = False,
) -> Rows:
    """Reads, checks and splits all rows; row ids are positions in the data, training rows first.

    Data with a test split keeps its splits; of anything else a fifth is held out by a hash of the question, or of the
    row's own key. Rows that say the same are taken once, and a training row whose question is held out is dropped.

    UserError names up to 20 rows that `parse` refuses with RowError or whose key stood before; with `drop_invalid`
    these are left out, counted and named in the log.
    """
    records = list(_read_path(source.path) if source.path is not None else _read_hub(source))
    usable, problems = _parse_all(records, parse, source.way_out)
    if problems and not drop_invalid:
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    num_invalid = len(records) - len(usable)
    report_dropped(problems, num_invalid)
    distinct = _without_duplicates(usable)
    prompts, num_held_out = _split(distinct, has_test_split=any(record.is_test for record in records))
    check_sizes(sizes, {split: len(prompts[split]) for split in SPLITS})
    limited = {split: prompts[split][: sizes[split]] for split in SPLITS}
    return Rows(limited, len(usable) - len(distinct), num_held_out, num_invalid)


def report_dropped(problems: Sequence[Problem], num_rows: int) -> None:
    """Says in the log how many rows were dropped, and what is wrong with the first of them."""
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:MAX_REPORTED_ROWS])
        logger.warning("dropped %d unusable rows (env.invalid_rows=drop):\n%s", num_rows, shown)


def _parse_all(
    records: Sequence[_Record], parse: Callable[[dict[str, Any]], ParsedRow], way_out: str
) -> tuple[list[_Numbered], list[Problem]]:
    """Usable rows, and what is wrong with the others."""
    rows: list[_Numbered] = []
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for index, record in enumerate(records):
        try:
            row = _parse(record.value, parse)
            if row.key is not None and str(row.key) in places:
                raise RowError((row.key, f'its "key" stands in {places[str(row.key)]} already'))
        except RowError as error:
            problems += [
                Problem(record.place, repr(value)[:100], constraint, way_out) for value, constraint in error.breaches
            ]
            continue
        if row.key is not None:
            places[str(row.key)] = record.place
        rows.append(_Numbered(index, record.is_test, row))
    return rows, problems


def _parse(value: Any, parse: Callable[[dict[str, Any]], ParsedRow]) -> ParsedRow:
    if isinstance(value, dict):
        return parse(value)
    raise RowError((value.line if isinstance(value, Unreadable) else value, "has to be a JSON object"))


def _without_duplicates(rows: Iterable[_Numbered]) -> list[_Numbered]:
    """The first of each split's rows that say the same."""
    first: dict[Any, _Numbered] = {}
    for row in rows:
        first.setdefault((row.is_test, question_key(row.row.question), row.row.identity), row)
    return list(first.values())


def _split(rows: Sequence[_Numbered], *, has_test_split: bool) -> tuple[dict[Split, list[Prompt]], int]:
    """The prompts of both splits, and how many training rows were left out because their question is held out."""
    is_test = [
        row.is_test if has_test_split else is_held_out(row.row.question if row.row.key is None else str(row.row.key), 0)
        for row in rows
    ]
    held_out = {question_key(row.row.question) for row, test in zip(rows, is_test, strict=True) if test}
    prompts: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
    num_held_out = 0
    for row, test in zip(rows, is_test, strict=True):
        if not test and question_key(row.row.question) in held_out:
            num_held_out += 1
        else:
            prompts["test" if test else "train"].append(
                Prompt(row.index, row.row.messages, row.row.gold, row.row.question)
            )
    return prompts, num_held_out


def _read_path(path: Path) -> Iterator[_Record]:
    """Training records, then test records."""
    files = _split_files(path)
    for split in SPLITS:
        for file in files[split]:
            values = read_records(file, "env.data_path")
            if not values:
                raise UserError(Problem("env.data_path", file, "has no rows", "give a file with a row on each line"))
            for number, value in enumerate(values, 1):
                yield _Record(f"{file} row {number}", split == "test", value)


def _split_files(path: Path) -> dict[Split, list[Path]]:
    """The files of each split. One file, or a folder of files that are named after no split, is one data set, and
    stands under train."""
    if path.is_file():
        return {"train": [path], "test": []}
    files = {split: _files_of_split(path, split) for split in SPLITS}
    if not any(files.values()):
        files["train"] = sorted(path.glob("*.jsonl")) or sorted(path.glob("*.parquet"))
    if not files["train"]:
        constraint = "has no file of training rows" if path.is_dir() else "does not exist"
        way_out = "give a folder with train.jsonl and test.jsonl (or .parquet), or one such file"
        raise UserError(Problem("env.data_path", path, constraint, way_out))
    return files


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """In the folder or its subfolder `main`: `train.jsonl`, `train.parquet` or `train-*.parquet`, whichever is there
    first."""
    for place in (folder, folder / "main"):
        for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"):
            found = sorted(place.glob(pattern))
            if found:
                return found
    return []


def _read_hub(source: DataSource) -> Iterator[_Record]:
    import datasets

    name = source.hub_name
    try:
        data = datasets.load_dataset(name, source.hub_config)
    except Exception as error:  # a lack of network shows itself in many types
        complaint = f"{name} cannot be loaded from the hub ({type(error).__name__}: {str(error)[:200]})"
        way_out = "connect to the network, or set env.data_path to a folder or file with such rows"
        raise UserError(
            Problem(source.key, "(blank)" if source.key == "env.data_path" else name, complaint, way_out)
        ) from error
    if "train" not in data:
        raise UserError(Problem(source.key, name, "has no split named train", "give files in env.data_path"))
    for split in SPLITS:
        for number, value in enumerate(data.get(split, ()), 1):
            yield _Record(f"{name} {split} row {number}", split == "test", value)


def read_records(file: Path, key: str) -> list[Any]:
    """One value per row of a JSON Lines or Parquet file; a line that is no JSON is an `Unreadable`.

    Raises UserError that names `key`, where the user gave the file, when it cannot be read.
    """
    return _read_parquet(file, key) if file.suffix == ".parquet" else _read_json_lines(file, key)


def _read_json_lines(file: Path, key: str) -> list[Any]:
    """One value per line; a byte-order mark and blank lines at the end do not count."""
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable_file(file, key, error) from error
    return [_parse_line(line) for line in lines] if lines != [""] else []


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return Unreadable(line)


def _read_parquet(file: Path, key: str) -> list[Any]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable_file(file, key, error) from error


def _unreadable_file(file: Path, key: str, error: Exception) -> UserError:
    return UserError(
        Problem(
            key,
            file,
            f"has to be a readable UTF-8 JSON Lines or Parquet file ({type(error).__name__}: {str(error)[:200]})",
            "give the path of such a file",
        )
    )
