"""Greedy evaluation on held-out problems, and the comparison of two evaluations of the same problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from expert_iteration.errors import Problem, UserError
from expert_iteration.selection import is_scored
from expert_iteration.statistics import mcnemar_exact, summarize, wilson_interval
from expert_iteration.types import Engine, GenerationRequest, Prompt, SamplingParams, Score, Turn, Verifier

Change = Literal["fixed", "still wrong", "broken", "still right"]
CHANGES: tuple[Change, ...] = ("fixed", "still wrong", "broken", "still right")


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """One held-out problem with the model's answer."""

    row_id: int
    messages: tuple[Mapping[str, str], ...]
    gold: Any
    response: str
    success: bool
    """By the task's exact metric; false for an answer that could not be scored, be it by the task alone."""
    reward: float | None
    num_response_tokens: int
    truncated: bool
    details: Mapping[str, float] = field(default_factory=dict)
    """What else the task said about the answer."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Answers to at least one problem, in the order in which they were asked."""

    problems: tuple[ProblemResult, ...]
    dropped_too_long: int
    """Problems left out because prompt and response would not fit the engine's context."""

    @property
    def num_right(self) -> int:
        return sum(problem.success for problem in self.problems)

    @property
    def accuracy(self) -> float:
        return self.num_right / len(self.problems)

    @property
    def interval(self) -> tuple[float, float]:
        """95% Wilson interval of the accuracy."""
        return wilson_interval(self.num_right, len(self.problems))

    def metrics(self) -> dict[str, float]:
        """`eval/*`."""
        low, high = self.interval
        return {
            "eval/accuracy": self.accuracy,
            "eval/low": low,
            "eval/high": high,
            "eval/num_problems": len(self.problems),
            "eval/unscored": sum(not is_scored(problem.reward) for problem in self.problems),
            "eval/dropped_too_long": self.dropped_too_long,
            "eval/response_length_mean": summarize([problem.num_response_tokens for problem in self.problems]).mean,
            "eval/truncated_share": summarize([problem.truncated for problem in self.problems]).mean,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations of the same problems."""

    pairs: tuple[tuple[ProblemResult, ProblemResult], ...]
    """The answers before and after to each problem."""
    before: EvaluationResult
    after: EvaluationResult

    def count(self, change: Change) -> int:
        return sum(change_of(before, after) == change for before, after in self.pairs)

    @property
    def p_value(self) -> float:
        """Exact McNemar test, two-sided, of whether the accuracy changed."""
        return mcnemar_exact(self.count("fixed"), self.count("broken"))


def evaluate(
    engine: Engine,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    *,
    encode: Callable[[Prompt], tuple[int, ...]],
    decode: Callable[[Turn], str],
    sampling: SamplingParams,
) -> EvaluationResult:
    """Answers every prompt once, greedily, and scores the answers.

    A prompt that leaves no room for `sampling.max_tokens` is dropped and counted. UserError when that is all of them;
    ValueError unless the temperature is 0.
    """
    if sampling.temperature != 0:
        raise ValueError(f"evaluation is greedy, got temperature {sampling.temperature}")
    encoded = [(prompt, encode(prompt)) for prompt in prompts]
    fitting = [(prompt, ids) for prompt, ids in encoded if len(ids) + sampling.max_tokens <= engine.max_model_len]
    if not fitting:
        raise UserError(
            Problem(
                key="inference_model.max_tokens",
                value=sampling.max_tokens,
                constraint=f"prompt and response share a context of {engine.max_model_len} tokens, "
                f"and none of the {len(prompts)} held-out prompts leaves room for the response",
                way_out="lower inference_model.max_tokens, or choose shorter prompts or a model with a longer context",
            )
        )
    requests = [GenerationRequest(prompt_ids=ids, seeds=(0,)) for _, ids in fitting]
    turns = [turn for (turn,) in engine.generate(requests, sampling)]
    texts = [decode(turn) for turn in turns]
    scores = verifier.score_many([(prompt, text) for (prompt, _), text in zip(fitting, texts, strict=True)])
    return EvaluationResult(
        problems=tuple(
            _problem_result(prompt, turn, text, score)
            for (prompt, _), turn, text, score in zip(fitting, turns, texts, scores, strict=True)
        ),
        dropped_too_long=len(encoded) - len(fitting),
    )


def _problem_result(prompt: Prompt, turn: Turn, response: str, score: Score) -> ProblemResult:
    return ProblemResult(
        row_id=prompt.row_id,
        messages=prompt.messages,
        gold=prompt.gold,
        response=response,
        success=is_scored(score.reward) and bool(score.details.get("success", False)),
        reward=score.reward,
        num_response_tokens=len(turn.response_ids),
        truncated=turn.finish_reason == "length",
        details=score.details,
    )


def compare(before: EvaluationResult, after: EvaluationResult) -> Comparison:
    """Pairs the answers by row id. ValueError unless both evaluations answered the same problems."""
    answers_after = {problem.row_id: problem for problem in after.problems}
    if {problem.row_id for problem in before.problems} != answers_after.keys():
        raise ValueError("the two evaluations answered different problems")
    pairs = tuple((problem, answers_after[problem.row_id]) for problem in before.problems)
    return Comparison(pairs=pairs, before=before, after=after)


def change_of(before: ProblemResult, after: ProblemResult) -> Change:
    """What became of one problem."""
    if after.success:
        return "still right" if before.success else "fixed"
    return "broken" if before.success else "still wrong"


def choose_transcripts(comparison: Comparison, count: int) -> list[tuple[ProblemResult, ProblemResult]]:
    """At most `count` pairs: the first of each kind of change in the order of CHANGES, then the second of each, ..."""
    by_change = {change: [pair for pair in comparison.pairs if change_of(*pair) == change] for change in CHANGES}
    rounds = max((len(pairs) for pairs in by_change.values()), default=0)
    return [pairs[i] for i in range(rounds) for pairs in by_change.values() if i < len(pairs)][:count]


def write_results(result: EvaluationResult, path: Path) -> None:
    """One JSON object per problem; a gold answer that JSON cannot hold is written as its text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in result.problems:
            row = asdict(problem)
            if not is_scored(problem.reward):
                row["reward"] = None
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def read_results(path: Path) -> EvaluationResult:
    """What `write_results` wrote; how many problems were dropped is not in the file and reads 0."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return EvaluationResult(
        tuple(ProblemResult(**{**row, "messages": tuple(row["messages"])}) for row in rows), dropped_too_long=0
    )


def comparison_report(comparison: Comparison, num_transcripts: int) -> RenderableType:
    """What the terminal shows at the end: both accuracies, the paired test, and transcripts side by side."""
    table = Table(title="Held-out accuracy, greedy", title_justify="left")
    for name in ("", "accuracy", "95% interval", "right", "mean length", "truncated"):
        table.add_column(name, justify="left" if not name else "right")
    for name, result in (("before", comparison.before), ("after", comparison.after)):
        low, high = result.interval
        metrics = result.metrics()
        table.add_row(
            name,
            f"{result.accuracy:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{result.num_right}/{len(result.problems)}",
            f"{metrics['eval/response_length_mean']:.1f}",
            f"{metrics['eval/truncated_share']:.1%}",
        )
    test = (
        f"Paired test (exact McNemar): {comparison.count('fixed')} fixed, {comparison.count('broken')} broken, "
        f"p = {comparison.p_value:.2g}"
    )
    transcripts = [_transcript(*pair) for pair in choose_transcripts(comparison, num_transcripts)]
    return Group(table, Text(test), *transcripts)


def _transcript(before: ProblemResult, after: ProblemResult) -> RenderableType:
    """One problem with its answers before and after in two columns."""
    question = printable(before.messages[-1]["content"])
    answers = Table.grid(padding=(0, 2), expand=True)
    answers.add_column(ratio=1)
    answers.add_column(ratio=1)
    answers.add_row(
        *(Text(heading, style="bold") for heading in (_verdict("before", before), _verdict("after", after)))
    )
    answers.add_row(Text(printable(before.response)), Text(printable(after.response)))
    gold = Text(f"gold answer: {printable(str(before.gold))}")
    return Panel(
        Group(Text(question), gold, Text(), answers),
        title=f"problem {before.row_id}: {change_of(before, after)}",
        title_align="left",
    )


def _verdict(when: str, result: ProblemResult) -> str:
    return f"{when}: {'right' if result.success else 'wrong'}{', truncated' if result.truncated else ''}"


def printable(text: str) -> str:
    """The text with control characters, which a model may emit, written as escapes; line breaks stay."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )
