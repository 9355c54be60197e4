"""Finding the prompt that a row of a file is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from expert_iteration.tasks.base import question_key
from expert_iteration.types import Prompt


class PromptIndex:
    """Prompts by row id, by question and by user message."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        listed = list(prompts)
        self._by_id: dict[Any, Prompt] = {prompt.row_id: prompt for prompt in listed}
        self._by_text = {question_key(prompt.messages[-1]["content"]): prompt for prompt in listed}
        self._by_text |= {question_key(prompt.question): prompt for prompt in listed if prompt.question}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, row: Mapping[str, Any]) -> Prompt | None:
        """The prompt with the row's "row_id"; without one, that whose question or last message is the row's "prompt",
        whatever its letter case and white space."""
        if "row_id" in row:
            return self._by_id.get(row["row_id"]) if isinstance(row["row_id"], int | str) else None
        text = row.get("prompt")
        return self._by_text.get(question_key(text)) if isinstance(text, str) else None
