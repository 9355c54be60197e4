"""Rows of questions and answers from JSON Lines and Parquet files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.base import MAX_REPORTED_ROWS

_WAY_OUT = 'write rows as {"question": "...", "answer": "... #### 72"} and repair or remove these'


@dataclass(frozen=True, slots=True)
class QARow:
    """One question with its gold answer."""

    index: int
    """Position in its file, or files, from 0, counted before anything was dropped."""
    question: str
    gold: str


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of one split, in the folder or its subfolder `main`: `train.jsonl`, `train.parquet` or
    `train-*.parquet`, whichever is there first; empty when there is none."""
    for place in (folder, folder / "main"):
        for pattern in (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet"):
            found = sorted(place.glob(pattern))
            if found:
                return found
    return []


def read_rows(files: Sequence[Path], gold_number: Callable[[str], str | None]) -> list[QARow]:
    """All rows of the files, in order. Raises UserError that names file and row (from 1) of up to 20 unusable ones."""
    rows: list[QARow] = []
    problems: list[Problem] = []
    for file in files:
        records = read_records(file)
        read, bad = parse_records(records, str(file), gold_number)
        rows += [QARow(len(rows) + row.index, row.question, row.gold) for row in read]
        problems += bad
        if not records:
            problems.append(Problem(str(file), "(empty)", "has to hold at least one row", _WAY_OUT))
    if problems:
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    return rows


def read_records(file: Path) -> list[Any]:
    """One value per row of a JSON Lines or Parquet file; a line that is no JSON is an `Unreadable`."""
    return _read_parquet(file) if file.suffix == ".parquet" else _read_json_lines(file)


def parse_records(
    records: Sequence[Any], source: str, gold_number: Callable[[str], str | None]
) -> tuple[list[QARow], list[Problem]]:
    """Rows with question and gold number, and a Problem for each record (counted from 1) without."""
    rows: list[QARow] = []
    problems: list[Problem] = []
    for index, record in enumerate(records):
        constraint, value = None, record
        question = record.get("question") if isinstance(record, dict) else None
        answer = record.get("answer") if isinstance(record, dict) else None
        gold = gold_number(answer) if isinstance(answer, str) else None
        if isinstance(record, Unreadable):
            constraint, value = "has to be a JSON object", record.line
        elif not isinstance(record, dict):
            constraint = "has to be a JSON object"
        elif not isinstance(question, str) or not question.strip():
            constraint, value = 'has to have a text "question"', question
        elif not isinstance(answer, str) or not answer.strip():
            constraint, value = 'has to have a text "answer"', answer
        elif gold is None:
            constraint, value = '"answer" has to end in "#### " and one number', answer[-80:]
        if constraint is None:
            assert isinstance(question, str) and gold is not None
            rows.append(QARow(index, question, gold))
        else:
            problems.append(Problem(f"{source} row {index + 1}", repr(value)[:100], constraint, _WAY_OUT))
    return rows, problems


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that is no JSON."""

    line: str


def _read_json_lines(file: Path) -> list[Any]:
    """One value per line; a byte-order mark and blank lines at the end do not count."""
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable_file(file, error) from error
    return [_parse_line(line) for line in lines] if lines != [""] else []


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return Unreadable(line)


def _read_parquet(file: Path) -> list[Any]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable_file(file, error) from error


def _unreadable_file(file: Path, error: Exception) -> UserError:
    return UserError(
        Problem(
            "env.data_path",
            file,
            f"has to be a readable UTF-8 JSON Lines or Parquet file ({type(error).__name__}: {str(error)[:200]})",
            "give the path of such a file, or of a folder with train.jsonl and test.jsonl",
        )
    )
