"""The check of a reward against the data before a run: what it has to reward, and what it must not.

gold answer -> the maximum of 1        empty response, another row's answer -> less
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.base import MAX_REPORTED_ROWS, SPLITS
from expert_iteration.tasks.row_files import report_dropped
from expert_iteration.types import Prompt, Score, ScoreMany, Split

MAX_OTHERS = 2
"""Answers of other rows that a row is tried with, next to its own answer corrupted."""
WAY_OUT = "repair or remove the row, choose another data set or generator, or write env.invalid_rows=drop"

Kind = Literal["gold", "empty", "wrong"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that its reward gets wrong."""

    row_id: int
    problem: Problem


def check_answers(
    prompts: Sequence[Prompt],
    score_many: ScoreMany,
    response_with: Callable[[str], str],
    *,
    gold_of: Callable[[Prompt], str | None] = lambda prompt: prompt.gold,
    by_success: bool = False,
    max_negatives: int | None = None,
    way_out: str = WAY_OUT,
) -> list[Failure]:
    """Rows whose gold answer does not get the mark 1, or whose empty response does, or all of several wrong ones.

    The wrong ones are the answers of the next rows that differ and the gold answer with a digit appended. One of them
    may be right by accident, where a question has several answers or two writings are equal, but not all of them.

    Args:
        prompts: rows of one split.
        score_many: scores them.
        response_with: the response that states an answer.
        gold_of: a row's gold answer; None where it has none, and then the empty response alone is tried.
        by_success: whether the mark is the detail "success" and not the reward.
        max_negatives: rows that are tried with an empty response and wrong answers, evenly spread; None is all.
        way_out: of each problem.
    """
    golds = [gold_of(prompt) for prompt in prompts]
    step = 1 if max_negatives is None else max(1, -(-len(prompts) // max_negatives))
    trials: list[tuple[int, Kind, str]] = []
    for index, gold in enumerate(golds):
        if index % step == 0:
            trials.append((index, "empty", ""))
        if gold is not None:
            trials.append((index, "gold", response_with(gold)))
            wrong = [*_others(golds, index), gold + "1"] if index % step == 0 else []
            trials += [(index, "wrong", response_with(answer)) for answer in wrong]
    scores = score_many([(prompts[index], response) for index, _, response in trials])
    tried: dict[tuple[int, Kind], list[tuple[str, Score]]] = {}
    for (index, kind, response), score in zip(trials, scores, strict=True):
        tried.setdefault((index, kind), []).append((response, score))
    return [
        _failure(prompts[index], _constraint(kind, by_success), *results[0], way_out)
        for (index, kind), results in tried.items()
        if all(_mark(score, by_success) == 1.0 for _, score in results) == (kind != "gold")
    ]


def _mark(score: Score, by_success: bool) -> float | None:
    return score.details.get("success") if by_success else score.reward


def settle(
    prompts: Mapping[Split, Sequence[Prompt]], failures: Sequence[Failure], *, drop: bool
) -> dict[Split, list[Prompt]]:
    """The prompts without those that failed. Raises UserError, which names up to 20, unless they are to be dropped, and
    when no others are left in a split."""
    problems = [failure.problem for failure in failures]
    if problems and not drop:
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    failed = {failure.row_id for failure in failures}
    kept = {split: [prompt for prompt in prompts[split] if prompt.row_id not in failed] for split in SPLITS}
    if any(prompts[split] and not kept[split] for split in SPLITS):
        raise UserError(*problems[:MAX_REPORTED_ROWS])
    report_dropped(problems, len(failed))
    return kept


def _others(golds: Sequence[str | None], index: int) -> list[str]:
    """The answers of the next rows that differ from a row's own and from each other."""
    found: list[str] = []
    for offset in range(1, min(len(golds), 50)):
        other = golds[(index + offset) % len(golds)]
        if other is not None and other != golds[index] and other not in found:
            found.append(other)
            if len(found) == MAX_OTHERS:
                break
    return found


def _constraint(kind: Kind, by_success: bool) -> str:
    maximum = "be a success" if by_success else "score the maximum of 1"
    if kind == "gold":
        return f"its gold response has to {maximum}"
    elif kind == "empty":
        return f"an empty response must not {maximum}"
    else:
        return f"responses of other rows must not all {maximum}"


def _failure(prompt: Prompt, constraint: str, response: str, score: Score, way_out: str) -> Failure:
    why = [name for name in score.details if name in ("timed_out", "crashed")]
    outcome = ", ".join(why) if why else f"the reward {score.reward}"
    question = prompt.messages[-1]["content"][:200]
    explained = f"{constraint}, and it got {outcome} (question: {question!r})"
    return Failure(prompt.row_id, Problem(f"row {prompt.row_id}", repr(response[:200]), explained, way_out))
