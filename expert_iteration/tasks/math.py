"""MATH: competition problems whose answer is a formula (https://arxiv.org/abs/2103.03874), compared by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from expert_iteration.tasks.answers import closeness, last_boxed_answer, last_marked_answer, strip_reasoning
from expert_iteration.tasks.base import (
    check_length_limit,
    render_prompt,
)
from expert_iteration.tasks.row_files import ParsedRow, RowError
from expert_iteration.tasks.row_task import ComponentTask
from expert_iteration.types import Prompt, Score, ScoreMany

MAX_CHARS = 2000
"""Without a marked answer it is looked for in so many characters at the end; a longer marked answer is wrong."""

CHECKED_ROWS = 200
"""Rows that the self-check tries with wrong answers: comparing formulas takes milliseconds each."""

_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_TOWER = re.compile(r"\^\s*(?:[0-9]+|\w|\{[^{}]*)\s*\^|\*\*\s*\w+\s*\*\*")
_HUGE = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?[0-9]{5}|[0-9]{4}\s*!|!\s*[)\]}]*\s*!|[0-9]\s*!\s*\^")

# Its warning that no time limit is set: the verifier pool has it, since math-verify's own works in no thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class Math(ComponentTask):
    """The data set with its reward; docs/rewards.md states both."""

    name = "math"
    hub_name = "DigitalLearningGmbH/MATH-lighteval"
    default_template = "{question}\n\nThink step by step. Then write the final answer as \\boxed{{answer}}."
    way_out = 'write rows as {"problem": "...", "answer": "..."} and repair or remove these'

    def _read_options(self, options: Mapping[str, Any]) -> None:
        self._length_limit = check_length_limit(options["length_limit"])

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]: 1 or 0 (exact), or the weighted mean of correct, format, closeness and length (graded)."""
        text = strip_reasoning(response_text)
        marked = last_marked_answer(text)
        answer = last_marked_answer(marked or "") or marked
        success = float(is_right(answer, text, prompt.gold))
        has_answer = answer is not None or success == 1.0
        details = {
            "success": success,
            "format": float(answer is not None and answer == last_boxed_answer(text)),
            "closeness": 1.0 if success else closeness(answer, prompt.gold),
            "length": float(has_answer and len(response_text) <= self._length_limit),
        }
        return Score(self._mix({"correct": success, **details}) if self._graded else success, details)

    def self_check(self, score_many: ScoreMany | None = None) -> None:
        """Raises UserError, or drops rows, unless every gold answer scores 1 and an empty or wrong one does not."""
        self._check_answers(score_many, lambda answer: f"\\boxed{{{answer}}}", max_negatives=CHECKED_ROWS)

    def _parse_row(self, record: dict[str, Any]) -> ParsedRow:
        problem, solution, answer = (record.get(name) for name in ("problem", "solution", "answer"))
        if not isinstance(problem, str) or not problem.strip():
            raise RowError((problem, 'has to have a text "problem"'))
        if answer is None and isinstance(solution, str):
            answer = last_boxed_answer(solution)
        if not isinstance(answer, str) or not answer.strip():
            raise RowError((record, 'has to have a text "answer", or a "solution" with \\boxed{...}'))
        return ParsedRow(problem, render_prompt(self._template, problem), answer.strip(), identity=answer.strip())


def is_right(answer: str | None, text: str, gold: str) -> bool:
    """Whether the marked answer, or without one the last formula or number at the end of the text, equals the gold.

    Equal writings are equal; all others are compared by math-verify, unless computing the answer could take for ever.
    """
    if answer is not None and _writing(answer) == _writing(gold):
        return True
    shown = text[-MAX_CHARS:] if answer is None else _boxed(answer)
    if len(shown) > MAX_CHARS or not may_be_computed(shown):
        return False
    try:
        target = parse(shown, parsing_timeout=None)
        return bool(target) and verify(parse(_boxed(gold), parsing_timeout=None), target, timeout_seconds=None)
    except Exception:  # parser and sympy fail on unforeseen formulas in ways of their own
        return False


def may_be_computed(text: str) -> bool:
    """False with a power in an exponent, an exponent of five digits, or a factorial of four: 9^{9^{9}} or 10000!."""
    return _TOWER.search(text) is None and _HUGE.search(text) is None


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _writing(answer: str) -> str:
    """The answer less what does not change its meaning: space (1 1/2 is not 11/2), dollar signs, size of fractions."""
    return _SPACE.sub("", answer).strip("$").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
