"""MATH: competition problems whose answer is a formula (https://arxiv.org/abs/2103.03874), compared by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from expert_iteration.tasks.answers import closeness, last_boxed_answer, last_marked_answer, strip_reasoning
from expert_iteration.tasks.base import SPLITS, check_gold_answers, check_prompt_template, render_prompt
from expert_iteration.tasks.row_files import ParsedRow, RowError, load_prompts
from expert_iteration.types import Prompt, Score, Split

HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"
PROMPT_TEMPLATE = "{question}\n\nThink step by step. Then write the final answer as \\boxed{{answer}}."
# In tenths, because 0.8 + 0.1 + 0.1 is not 1 in floating point.
CORRECT_TENTHS = 8
FORMAT_TENTHS = 1
CLOSENESS_TENTHS = 1
MAX_CHARS = 2000
"""Without a marked answer it is looked for in so many characters at the end; a longer marked answer is wrong."""

_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_TOWER = re.compile(r"\^\s*(?:[0-9]+|\w|\{[^{}]*)\s*\^|\*\*\s*\w+\s*\*\*")
_HUGE = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?[0-9]{5}|[0-9]{4}\s*!|!\s*[)\]}]*\s*!|[0-9]\s*!\s*\^")

# Its warning that no time limit is set: the verifier pool has it, since math-verify's own works in no thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class Math:
    """The data set with its reward; docs/rewards.md states both."""

    name = "math"

    def __init__(
        self,
        *,
        data_path: str | None = None,
        prompt_template: str | None = None,
        reward: str = "exact",
        train_size: int | None = None,
        test_size: int | None = None,
    ) -> None:
        """Reads and checks all rows. Raises UserError for unusable files, rows, sizes or a bad prompt template."""
        self._template = prompt_template or PROMPT_TEMPLATE
        check_prompt_template(self._template)
        self._graded = reward == "graded"
        source = (HUB_NAME, None) if data_path is None else Path(data_path)
        self._prompts = load_prompts(source, self._parse_row, {"train": train_size, "test": test_size})

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows: a worker that scores gets each prompt with its response."""
        return self.__dict__ | {"_prompts": {split: [] for split in SPLITS}}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split, in the order of the data. No question stands in both splits."""
        return self._prompts[split]

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]: 1 or 0 (exact), or the weighted sum of correct, format and closeness (graded)."""
        text = strip_reasoning(response_text)
        marked = last_marked_answer(text)
        answer = last_marked_answer(marked or "") or marked
        success = float(is_right(answer, text, prompt.gold))
        in_format = float(answer is not None and answer == last_boxed_answer(text))
        near = 1.0 if success else closeness(answer, prompt.gold)
        graded = (CORRECT_TENTHS * success + FORMAT_TENTHS * in_format + CLOSENESS_TENTHS * near) / 10
        return Score(graded if self._graded else success, {"success": success, "format": in_format, "closeness": near})

    def self_check(self) -> None:
        """Raises UserError, naming rows, unless every gold answer scores 1 and no empty response does."""
        for split in SPLITS:
            check_gold_answers(self.prompts(split), self.score, lambda prompt: f"\\boxed{{{prompt.gold}}}")

    def _parse_row(self, record: dict[str, Any]) -> ParsedRow:
        problem, solution, answer = (record.get(name) for name in ("problem", "solution", "answer"))
        if not isinstance(problem, str) or not problem.strip():
            raise RowError('has to have a text "problem"')
        if answer is None and isinstance(solution, str):
            answer = last_boxed_answer(solution)
        if not isinstance(answer, str) or not answer.strip():
            raise RowError('has to have a text "answer", or a "solution" with \\boxed{...}')
        return ParsedRow(
            problem, tuple(dict(message) for message in render_prompt(self._template, problem)), answer.strip()
        )


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
