"""Responses from a file, matched with a task's prompts and scored: how a reward is looked at without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.base import MAX_REPORTED_ROWS, SPLITS
from expert_iteration.tasks.prompt_index import PromptIndex
from expert_iteration.tasks.row_files import read_records
from expert_iteration.types import Prompt, Score, Task

_WAY_OUT = 'write {"row_id": 7, "response": "..."} or {"prompt": "...", "response": "..."}'


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """One response with what the task said about it."""

    line: int
    """In the file, from 1."""
    prompt: Prompt
    response: str
    score: Score


def read_responses(path: Path, task: Task) -> list[tuple[int, Prompt, str]]:
    """Line, prompt and response of each row of a JSON Lines or Parquet file.

    A row has "response" (or "rollouts" with "text", as samples.jsonl), and "row_id" or "prompt": the
    question or the whole user message. Raises UserError that names up to 20 rows without, and for a file without rows.
    """
    if not path.is_file():
        raise UserError(Problem("responses", path, "no such file", "give a JSON Lines or Parquet file"))
    records = read_records(path, "responses")
    if not records:
        raise UserError(Problem(str(path), "(empty)", "has to hold at least one row", _WAY_OUT))
    prompts = PromptIndex(prompt for split in SPLITS for prompt in task.prompts(split))
    found, problems = [], []
    for line, record in enumerate(records, 1):
        row = record if isinstance(record, Mapping) else {}
        responses = list(_responses(row))
        matching = prompts.find(row)
        if not responses:
            constraint = 'has to have a text "response"'
        elif not matching:
            constraint = f'has to have a "row_id" or "prompt" that is one of the {len(prompts)} of the task'
            if row.get("row_id") is not None and "prompt" in row:
                constraint += ", and where it has both they have to agree"
        elif len(matching) > 1:
            constraint = f'has to have a "row_id": its "prompt" is that of {len(matching)} rows of the task'
        else:
            found += [(line, matching[0], response) for response in responses]
            continue
        problems.append(Problem(f"{path} row {line}", repr(record)[:100], constraint, _WAY_OUT))
    if problems:
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    return found


def _responses(row: Mapping[str, Any]) -> Iterator[str]:
    rollouts = row.get("rollouts")
    for text in [rollout.get("text") for rollout in rollouts] if isinstance(rollouts, list) else [row.get("response")]:
        if isinstance(text, str):
            yield text


def write_scores(scored: Sequence[ScoredResponse], path: Path) -> None:
    """One JSON object per response."""
    with path.open("w", encoding="utf-8") as file:
        for entry in scored:
            row = {
                "line": entry.line,
                "row_id": entry.prompt.row_id,
                "response": entry.response,
                "reward": entry.score.reward,
                "details": entry.score.details,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def score_table(scored: Sequence[ScoredResponse], *, max_rows: int) -> Group:
    """The first responses with their rewards and details, and the means over all of them."""
    responses = Table(title=f"{len(scored)} responses", title_justify="left")
    for heading in ("row", "response", "reward", "details"):
        responses.add_column(heading, justify="right" if heading in ("row", "reward") else "left", overflow="fold")
    for entry in scored[:max_rows]:
        details = Text("  ".join(f"{name} {_shown(value)}" for name, value in entry.score.details.items()))
        response = Text(repr(entry.response[-60:])[1:-1])
        responses.add_row(str(entry.prompt.row_id), response, _shown(entry.score.reward), details)
    means = Table(title="means", title_justify="left")
    for heading in ("", "mean", "of"):
        means.add_column(heading, justify="right" if heading else "left")
    names = sorted({name for entry in scored for name in entry.score.details})
    columns = {"reward": [entry.score.reward for entry in scored]}
    columns |= {name: [entry.score.details.get(name) for entry in scored] for name in names}
    for name, values in columns.items():
        there = [value for value in values if value is not None]
        means.add_row(name, _shown(sum(there) / len(there) if there else None), str(len(there)))
    return Group(responses, means)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
