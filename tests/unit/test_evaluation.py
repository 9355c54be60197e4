"""Evaluation with a hand-written engine and task, and the paired comparison against values computed by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from expert_iteration.engines.local import LocalEngine
from expert_iteration.errors import UserError
from expert_iteration.evaluation import (
    EvaluationResult,
    ProblemResult,
    change_of,
    choose_transcripts,
    compare,
    comparison_report,
    evaluate,
    printable,
    write_results,
)
from expert_iteration.metrics.glossary import check_names
from expert_iteration.tasks.verifier_pool import InProcessVerifier
from expert_iteration.types import GenerationRequest, Prompt, SamplingParams, Score, Split, Turn

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, stop_token_ids=(0,))


class EchoEngine:
    """Answers with the first prompt token and the end token, or with max_tokens tokens when that token is 9."""

    policy_version = 0
    max_model_len = 8

    def __init__(self) -> None:
        self.seeds: list[tuple[int, ...]] = []

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Turn]]:
        self.seeds += [request.seeds for request in requests]
        return [[self._answer(request.prompt_ids, sampling.max_tokens)] for request in requests]

    def _answer(self, prompt_ids: tuple[int, ...], max_tokens: int) -> Turn:
        first = prompt_ids[0]
        if first == 9:
            return Turn(prompt_ids, (first,) * max_tokens, (-1.0,) * max_tokens, "length")
        return Turn(prompt_ids, (first, 0), (-1.0, -1.0), "stop")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError("evaluation loads no weights")

    def checksum(self) -> str:
        raise AssertionError("evaluation asks for no checksum")


class EqualTask:
    """Right when the response is the gold text; a gold of None cannot be scored, and one of NaN is scored NaN."""

    name = "equal"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        raise AssertionError("the prompts are given")

    def score(self, prompt: Prompt, response_text: str) -> Score:
        if prompt.gold is None:
            return Score(None)
        if prompt.gold != prompt.gold:
            return Score(nan, {"success": 1.0})
        right = float(response_text == prompt.gold)
        return Score(0.1 + 0.9 * right, {"success": right})

    def self_check(self) -> None:
        raise AssertionError("evaluation checks no gold answers")


def prompt(row_id: int, content: str, gold: object) -> Prompt:
    return Prompt(row_id, ({"role": "user", "content": content},), gold)


def encode(question: Prompt) -> tuple[int, ...]:
    return tuple(int(digit) for digit in question.messages[0]["content"])


def decode(turn: Turn) -> str:
    return "".join(str(token) for token in turn.response_ids if token != 0)


def run(prompts: Sequence[Prompt], engine: EchoEngine | None = None) -> EvaluationResult:
    return evaluate(
        engine or EchoEngine(),
        InProcessVerifier(EqualTask().score),
        prompts,
        encode=encode,
        decode=decode,
        sampling=GREEDY,
    )


def answered(row_id: int, success: bool, response: str = "7") -> ProblemResult:
    messages = ({"role": "user", "content": f"question {row_id}"},)
    return ProblemResult(row_id, messages, "7", response, success, float(success), 2, False)


def result(*successes: bool) -> EvaluationResult:
    return EvaluationResult(tuple(answered(i, success) for i, success in enumerate(successes)), dropped_too_long=0)


def test_every_problem_is_answered_once_and_scored() -> None:
    engine = EchoEngine()
    evaluation = run([prompt(3, "123", "1"), prompt(5, "21", "1"), prompt(4, "94", "9999")], engine)
    assert engine.seeds == [(0,), (0,), (0,)]
    assert [(p.row_id, p.response, p.success, p.reward) for p in evaluation.problems] == [
        (3, "1", True, 1.0),
        (5, "2", False, 0.1),
        (4, "9999", True, 1.0),
    ]
    assert [p.truncated for p in evaluation.problems] == [False, False, True]
    assert [p.num_response_tokens for p in evaluation.problems] == [2, 2, 4]


def test_metrics_by_hand() -> None:
    evaluation = run([prompt(i, "1", "1" if i < 3 else "2") for i in range(7)] + [prompt(7, "9", "1")])
    metrics = evaluation.metrics()
    assert metrics["eval/accuracy"] == 3 / 8
    # Wilson with z = 1.959964: centre (0.375 + 0.240091) / 1.480182, half width 1.324137 * sqrt(0.0292969 + 0.0150057)
    assert metrics["eval/low"] == pytest.approx(0.136844, abs=1e-6)
    assert metrics["eval/high"] == pytest.approx(0.694258, abs=1e-6)
    assert metrics["eval/num_problems"] == 8
    assert metrics["eval/response_length_mean"] == (7 * 2 + 4) / 8
    assert metrics["eval/truncated_share"] == 1 / 8
    assert metrics["eval/unscored"] == metrics["eval/dropped_too_long"] == 0
    check_names(metrics)


def test_unscored_answers_count_as_wrong() -> None:
    evaluation = run([prompt(0, "1", "1"), prompt(1, "1", None), prompt(2, "1", nan)])
    assert evaluation.accuracy == 1 / 3
    assert evaluation.metrics()["eval/unscored"] == 2


def test_an_answer_that_only_a_reward_model_scored_counts_as_wrong() -> None:
    """The task timed out on it, and with reward_model.task_weight=0 it has a reward all the same."""

    class Beside:
        def score_many(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
            return [Score(0.7, {"timed_out": 1.0, "reward_model": 0.7}) for _ in items]

        def close(self) -> None:
            pass

    prompt = Prompt(0, ({"role": "user", "content": "5"},))
    result = evaluate(EchoEngine(), Beside(), [prompt], encode=lambda _: (5,), decode=lambda _: "5", sampling=GREEDY)
    (problem,) = result.problems
    assert (problem.success, problem.reward) == (False, 0.7)


def test_a_prompt_without_room_for_the_response_is_dropped_and_counted() -> None:
    # The context has 8 tokens and the response may take 4: a prompt of 4 fits, one of 5 does not.
    evaluation = run([prompt(0, "1111", "1"), prompt(1, "11111", "1")])
    assert [problem.row_id for problem in evaluation.problems] == [0]
    assert evaluation.metrics()["eval/dropped_too_long"] == 1


def test_a_real_engine_is_evaluated_by_its_greedy_answers() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config).eval()
    questions = [prompt(i, text, None) for i, text in enumerate(["12", "7", "3456"])]
    expected = []
    for question in questions:
        ids = torch.tensor([encode(question)])  # (1, T)
        for _ in range(GREEDY.max_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        expected.append(" ".join(map(str, ids[0, -GREEDY.max_tokens :].tolist())))
    evaluation = evaluate(
        LocalEngine(model, max_sequences=2),
        InProcessVerifier(EqualTask().score),
        [replace(question, gold=answer) for question, answer in zip(questions, expected, strict=True)],
        encode=encode,
        decode=lambda turn: " ".join(map(str, turn.response_ids)),
        sampling=replace(GREEDY, stop_token_ids=()),
    )
    assert [problem.response for problem in evaluation.problems] == expected
    assert evaluation.accuracy == 1.0


def test_no_prompt_that_fits_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"inference_model.max_tokens=4: .* context of 8 tokens"):
        run([prompt(1, "11111", "1")])


def test_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match="greedy"):
        evaluate(
            EchoEngine(),
            InProcessVerifier(EqualTask().score),
            [prompt(0, "1", "1")],
            encode=encode,
            decode=decode,
            sampling=replace(GREEDY, temperature=0.7),
        )


def test_the_comparison_pairs_by_row_id_and_tests_exactly() -> None:
    before = result(False, False, False, False, False, False, True, True, True, False)
    after = result(True, True, True, True, True, True, False, False, True, False)
    shuffled = EvaluationResult(tuple(reversed(after.problems)), dropped_too_long=0)
    comparison = compare(before, shuffled)
    assert comparison.count("fixed") == 6
    assert comparison.count("broken") == 2
    assert comparison.count("still right") == 1
    assert comparison.count("still wrong") == 1
    assert comparison.p_value == pytest.approx(74 / 256)  # 2 * (1 + 8 + 28) / 2^8


def test_evaluations_of_different_problems_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different problems"):
        compare(result(True, False), result(True))


def test_transcripts_show_each_kind_of_change_before_any_twice() -> None:
    before = result(False, False, False, True, True, True)
    after = result(False, True, True, True, False, True)
    comparison = compare(before, after)
    assert [change_of(*pair) for pair in comparison.pairs] == [
        "still wrong",
        "fixed",
        "fixed",
        "still right",
        "broken",
        "still right",
    ]
    assert [pair[0].row_id for pair in choose_transcripts(comparison, 3)] == [1, 0, 4]
    assert [pair[0].row_id for pair in choose_transcripts(comparison, 99)] == [1, 0, 4, 3, 2, 5]
    assert choose_transcripts(comparison, 0) == []


def test_without_broken_problems_the_third_transcript_is_one_still_right() -> None:
    comparison = compare(result(False, False, True), result(False, True, True))
    assert [pair[0].row_id for pair in choose_transcripts(comparison, 3)] == [1, 0, 2]


def test_results_are_written_one_problem_a_line(tmp_path: Path) -> None:
    path = tmp_path / "evaluation" / "after.jsonl"
    write_results(run([prompt(3, "123", "1"), prompt(4, "2", nan), prompt(5, "2", frozenset())]), path)
    first, second, third = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {
        "row_id": 3,
        "messages": [{"role": "user", "content": "123"}],
        "gold": "1",
        "response": "1",
        "success": True,
        "reward": 1.0,
        "num_response_tokens": 2,
        "truncated": False,
        "details": {"success": 1.0},
    }
    assert second["reward"] is None and second["success"] is False
    assert third["gold"] == "frozenset()"


def test_the_report_shows_accuracies_test_and_transcripts_as_they_are() -> None:
    before = EvaluationResult((answered(0, False, "[bold]six[/bold]\x1b[31m"), answered(1, True)), 0)
    after = EvaluationResult((answered(0, True), answered(1, True)), 0)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    with console.capture() as capture:
        console.print(comparison_report(compare(before, after), 1))
    text = capture.get()
    assert "0.500" in text and "0.095 to 0.905" in text and "1/2" in text
    assert "1.000" in text and "0.342 to 1.000" in text and "2/2" in text
    assert "1 fixed, 0 broken, p = 1" in text
    assert "problem 0: fixed" in text and "problem 1" not in text
    row = next(line for line in text.splitlines() if "[bold]six[/bold]" in line)
    assert "\\x1b[31m" in row and row.rstrip(" │").endswith("7")  # side by side, escapes spelt out
    assert "\x1b" not in text


def test_control_characters_are_spelt_out() -> None:
    assert printable("a\nb\tc\x07é\u202e") == "a\nb\\tc\\x07é\\u202e"
