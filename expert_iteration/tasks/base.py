"""What every task needs: the prompt, the split by question text, sizes and options."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from expert_iteration.config.task_defaults import TASK_OPTIONS
from expert_iteration.errors import Problem, UserError
from expert_iteration.types import Split

SPLITS: tuple[Split, ...] = ("train", "test")
HELD_OUT_SHARE = 0.2
MAX_REPORTED_ROWS = 20


def check_prompt_template(template: str) -> None:
    """Raises UserError unless `str.format` fills the template with a question alone."""
    try:
        shows_question = "<the question>" in template.format(question="<the question>")
    except (KeyError, IndexError, ValueError, AttributeError):
        shows_question = False
    if not shows_question:
        raise UserError(
            Problem(
                "env.prompt_template",
                template,
                "has to contain {question} and no other single braces",
                "write {question} where the question goes and double every other brace, as in {{x}}",
            )
        )


def render_prompt(template: str, question: str) -> tuple[Mapping[str, str], ...]:
    """The chat messages that ask a question: one user message."""
    return ({"role": "user", "content": template.format(question=question)},)


def question_key(question: str) -> str:
    """What makes two questions the same: their text, whatever its letter case and white space."""
    return " ".join(question.casefold().split())


def is_held_out(question: str, data_seed: int) -> bool:
    """Whether a question belongs to the held-out fifth of all questions.

    A hash of its text and of the data seed decides, so neither a size nor the run's seed moves a question across.
    """
    digest = hashlib.sha256(f"{data_seed}\n{question_key(question)}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def check_sizes(sizes: Mapping[Split, int | None], num_rows: Mapping[Split, int]) -> None:
    """Raises UserError unless each split has as many rows as `env.{split}_size` asks for, and one where it is blank."""
    problems = [
        Problem(
            f"env.{split}_size",
            "(blank)" if sizes[split] is None else sizes[split],
            f"the data set has {num_rows[split]} distinct rows in this split, and at least one is needed",
            f"set env.{split}_size to at most {num_rows[split]}, or give more data in env.data_path",
        )
        for split in SPLITS
        if num_rows[split] < (sizes[split] or 1)
    ]
    if problems:
        raise UserError(*problems)


def with_default_options(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a task. Raises UserError that names those that it does not have."""
    defaults = TASK_OPTIONS[task]
    way_out = f"choose among {', '.join(defaults)}, or leave it out"
    unknown = [
        Problem(f"env.options.{name}", value, f"is no option of {task}", way_out)
        for name, value in given.items()
        if name not in defaults
    ]
    if unknown:
        raise UserError(*unknown)
    return {**defaults, **given}


def check_length_limit(limit: Any) -> int:
    """Raises UserError unless it is a number of characters."""
    if type(limit) is not int or limit < 1:
        constraint = "has to be a whole number of at least 1, in characters"
        raise UserError(Problem("env.options.length_limit", limit, constraint, "give such a number or leave it out"))
    return limit
