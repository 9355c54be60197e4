"""GSM8K: grade-school word problems whose answer is a number (https://arxiv.org/abs/2110.14168).

The same reward serves every file of rows {"question": "...", "answer": "... #### 72"}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from expert_iteration.tasks.answers import (
    answers_match,
    closeness,
    extract_answer,
    find_numbers,
    parse_number,
    strip_reasoning,
)
from expert_iteration.tasks.base import check_length_limit, render_prompt
from expert_iteration.tasks.row_files import ParsedRow, RowError
from expert_iteration.tasks.row_task import ComponentTask
from expert_iteration.types import Prompt, Score, ScoreMany

__all__ = ["GSM8K", "answers_match", "extract_answer", "gold_number"]

_ANSWER_LINE = re.compile(r"####(?!#)\s*(\S.*)")


class GSM8K(ComponentTask):
    """The data set with its reward; docs/rewards.md states both."""

    name = "gsm8k"
    hub_name = "openai/gsm8k"
    hub_config = "main"
    default_template = (
        "{question}\n\n"
        'Think step by step. Then write the answer on a last line of its own, as "#### <number>", with nothing after '
        "it."
    )
    way_out = 'write rows as {"question": "...", "answer": "... #### 72"} and repair or remove these'

    def _read_options(self, options: Mapping[str, Any]) -> None:
        self._length_limit = check_length_limit(options["length_limit"])

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]: 1 or 0 (exact), or the weighted mean of correct, format, closeness and length (graded)."""
        answer = extract_answer(response_text)
        success = float(answer is not None and answers_match(answer, prompt.gold))
        details = {
            "success": success,
            "format": float(ends_with_answer_line(response_text)),
            "closeness": closeness(answer, prompt.gold),
            "length": float(answer is not None and len(response_text) <= self._length_limit),
        }
        return Score(self._mix({"correct": success, **details}) if self._graded else success, details)

    def self_check(self, score_many: ScoreMany | None = None) -> None:
        """Raises UserError, or drops rows, unless every gold answer scores 1 and an empty or wrong one does not."""
        self._check_answers(score_many, lambda answer: f"#### {answer}")

    def _parse_row(self, record: dict[str, Any]) -> ParsedRow:
        question, answer = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not question.strip():
            raise RowError((question, 'has to have a text "question"'))
        if not isinstance(answer, str) or not answer.strip():
            raise RowError((answer, 'has to have a text "answer"'))
        gold = gold_number(answer)
        if gold is None:
            raise RowError((answer[-80:], '"answer" has to end in "#### " and one number'))
        return ParsedRow(question, render_prompt(self._template, question), gold, identity=parse_number(gold))


def gold_number(solution: str) -> str | None:
    """The one number after the last `####` of a solution; None without."""
    _, hashes, answer = solution.rpartition("####")
    return find_numbers(answer)[0] if hashes and parse_number(answer) is not None else None


def ends_with_answer_line(response: str) -> bool:
    """Whether the last line that is not blank is `#### ` with one number."""
    last_line = strip_reasoning(response).rstrip().rpartition("\n")[2].strip()
    match = _ANSWER_LINE.fullmatch(last_line)
    return match is not None and len(find_numbers(match.group(1))) == 1
