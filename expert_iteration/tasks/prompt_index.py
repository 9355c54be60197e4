"""Finding the prompts that a row of a file is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from expert_iteration.tasks.base import question_key
from expert_iteration.types import Prompt


class PromptIndex:
    """Prompts by row id, and by question and user message, whatever their letter case and white space."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._by_id: dict[int, Prompt] = {}
        self._by_text: dict[str, dict[int, Prompt]] = {}
        for prompt in prompts:
            self._by_id[prompt.row_id] = prompt
            for text in filter(None, (prompt.question, prompt.messages[-1]["content"])):
                self._by_text.setdefault(question_key(text), {})[prompt.row_id] = prompt

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, row: Mapping[str, Any]) -> list[Prompt]:
        """The prompts that fit the row's "row_id" and its "prompt", as far as it has them: the question, or the whole
        user message. Several rows of the data may ask one question; a row id whose prompt is another one fits none."""
        if row.get("row_id") is None:
            return list(self._with_text(row).values())
        elif isinstance(row.get("prompt"), str):
            return [prompt for prompt in self._with_id(row) if prompt.row_id in self._with_text(row)]
        else:
            return self._with_id(row)

    def names_any(self, row: Mapping[str, Any]) -> bool:
        """Whether the row's "row_id" or its "prompt" is that of a prompt, whatever the other one is."""
        return bool(self._with_id(row) or self._with_text(row))

    def _with_id(self, row: Mapping[str, Any]) -> list[Prompt]:
        row_id = row.get("row_id")
        return [self._by_id[row_id]] if type(row_id) is int and row_id in self._by_id else []

    def _with_text(self, row: Mapping[str, Any]) -> Mapping[int, Prompt]:
        text = row.get("prompt")
        return self._by_text.get(question_key(text), {}) if isinstance(text, str) else {}
