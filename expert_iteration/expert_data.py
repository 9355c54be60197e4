"""Responses written by people or by other models, which enter the groups of the prompts that they answer.

    file -> rows matched with training prompts -> ids as the policy would have sampled them -> rollouts of the group

Learning from both the policy's own successes and an expert's is how Expert Iteration began (Anthony et al. 2017,
https://arxiv.org/abs/1705.08439); here the expert's responses are scored, selected and held to the reference like the
policy's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert_iteration.chat import ChatEncoder
from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.base import MAX_REPORTED_ROWS
from expert_iteration.tasks.prompt_index import PromptIndex
from expert_iteration.tasks.row_files import Unreadable, read_records
from expert_iteration.types import POLICY, Task, Turn

KEY = "env.expert_data"
DEFAULT_SOURCE = "expert"
_SURROGATE = re.compile("[\ud800-\udfff]")
_WAY_OUT = 'write {"row_id": 7, "response": "..."} or {"prompt": "...", "response": "..."}, with a "source" if wanted'


@dataclass(frozen=True, slots=True)
class ExpertResponse:
    """One response to one training prompt."""

    response_ids: tuple[int, ...]
    """With the end token."""
    source: str
    """Who wrote it."""

    def turn(self, prompt_ids: tuple[int, ...]) -> Turn:
        """As a turn that no engine has sampled: its log-probs are missing, which is NaN and never 0."""
        missing = (float("nan"),) * len(self.response_ids)
        return Turn(prompt_ids, self.response_ids, missing, "stop")


@dataclass(frozen=True, slots=True)
class ExpertData:
    """Responses by the row id of their training prompt, and how many were left out."""

    responses: Mapping[int, Sequence[ExpertResponse]]
    num_held_out: int
    """Answers to held-out prompts, which are never trained on."""
    num_unmatched: int
    """Answers to no prompt of the training split."""
    num_too_long: int
    """Responses of more than max_tokens tokens."""

    def metrics(self) -> dict[str, float]:
        """How many rows of the file were left out, for the log."""
        return {
            "expert/dropped_held_out": self.num_held_out,
            "expert/dropped_unmatched": self.num_unmatched,
            "expert/dropped_too_long": self.num_too_long,
        }

    def __str__(self) -> str:
        total = sum(map(len, self.responses.values()))
        return (
            f"Expert data: {total} responses to {len(self.responses)} training prompts; left out: "
            f"{self.num_held_out} to held-out prompts, {self.num_unmatched} to no training prompt, {self.num_too_long} "
            "above inference_model.max_tokens."
        )


def load_expert_data(path: Path, task: Task, encoder: ChatEncoder, *, max_tokens: int) -> ExpertData:
    """Reads a JSON Lines or Parquet file of rows with "response", "row_id" or "prompt", and perhaps "source".

    A row that names a held-out prompt, by its "row_id" or its "prompt", is never used. Raises UserError that names up
    to 20 unusable rows, or when no row is left.
    """
    train, test = PromptIndex(task.prompts("train")), PromptIndex(task.prompts("test"))
    responses: dict[int, dict[tuple[int, ...], ExpertResponse]] = {}
    problems: list[Problem] = []
    num_held_out = num_unmatched = num_too_long = 0
    for number, record in enumerate(read_records(path, KEY), 1):
        breach = _breach(record)
        if breach is None:
            if test.names_any(record):
                num_held_out += 1
                continue
            prompts = train.find(record)
            if not prompts:
                num_unmatched += 1
                continue
            ids = encoder.encode_response(record["response"])
            breach = _token_breach(ids, encoder)
        if breach is not None:
            shown = record.line if isinstance(record, Unreadable) else record
            problems.append(Problem(f"{path} row {number}", repr(shown)[:100], breach, _WAY_OUT))
        elif len(ids) > max_tokens:
            num_too_long += 1
        else:
            response = ExpertResponse(ids, record.get("source") or DEFAULT_SOURCE)
            for prompt in prompts:
                responses.setdefault(prompt.row_id, {}).setdefault(ids, response)
    if problems:
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    by_row = {row_id: tuple(distinct.values()) for row_id, distinct in responses.items()}
    data = ExpertData(by_row, num_held_out, num_unmatched, num_too_long)
    if not by_row:
        way_out = "give answers to prompts of the training split, or leave the key blank"
        raise UserError(Problem(KEY, path, f"no row can be used. {data}".rstrip("."), way_out))
    return data


def _breach(record: Any) -> str | None:
    """What is wrong with a row before its prompt is looked for; None when nothing is."""
    if not isinstance(record, dict):
        return "has to be a JSON object"
    response, row_id, source = record.get("response"), record.get("row_id"), record.get("source")
    if not _is_text(response):
        return 'has to have a text "response", neither blank nor with half a character (a lone surrogate)'
    if row_id is None and not isinstance(record.get("prompt"), str):
        return 'has to have a "row_id" or a text "prompt"'
    if row_id is not None and type(row_id) is not int:
        return '"row_id" has to be a whole number'
    if source is not None and (not _is_text(source) or source.strip().casefold() == POLICY):
        return f'"source" has to be such a text too, other than {POLICY!r}'
    return None


def _is_text(value: Any) -> bool:
    """Whether it is text with something in it, and without halves of characters, which JSON lets through."""
    return isinstance(value, str) and bool(value.strip()) and _SURROGATE.search(value) is None


def _token_breach(ids: tuple[int, ...], encoder: ChatEncoder) -> str | None:
    """A token among the ids that begins a text, or that ends it before its end; None when there is none."""
    written = ids[:-1] if encoder.stop_token_ids else ids
    for token_id in (encoder.tokenizer.bos_token_id, *encoder.stop_token_ids):
        if token_id in written:
            token = encoder.tokenizer.convert_ids_to_tokens(token_id)
            return f'"response" must not contain {token}, which begins or ends a text'
    return None
