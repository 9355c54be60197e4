"""What every task needs: the prompt, the split by question text, and the check of the gold answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from expert_iteration.errors import Problem, UserError
from expert_iteration.types import Prompt, Score, Split

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


def check_gold_answers(
    prompts: Iterable[Prompt], score: Callable[[Prompt, str], Score], gold_response: Callable[[Prompt], str | None]
) -> None:
    """Raises UserError that names up to 20 rows whose gold answer does not score the maximum of 1, or whose empty
    response does.

    `gold_response` gives the response that states a row's gold answer, None where a row has no gold answer.
    """
    problems: list[Problem] = []
    for prompt in prompts:
        response = gold_response(prompt)
        if response is not None and score(prompt, response).reward != 1.0:
            problems.append(_gold_problem(prompt, response, "its gold answer has to score the maximum of 1"))
        if score(prompt, "").reward == 1.0:
            problems.append(_gold_problem(prompt, "", "an empty response must not score the maximum of 1"))
        if len(problems) >= MAX_REPORTED_ROWS:
            break
    if problems:
        raise UserError(*problems)


def _gold_problem(prompt: Prompt, response: Any, constraint: str) -> Problem:
    question = prompt.messages[-1]["content"]
    return Problem(
        f"row {prompt.row_id}",
        repr(response),
        f"{constraint} (question: {question[:200]!r})",
        "repair or remove the row, or choose another data set or generator",
    )
