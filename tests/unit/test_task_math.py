"""MATH: rows, formulas that are equal and are not, and answers that could take for ever."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_iteration.config.task_defaults import REWARD_WEIGHTS
from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task, make_verifier
from expert_iteration.types import Prompt

pytest.importorskip("math_verify", reason="the package math-verify is not installed")
from expert_iteration.tasks.math import Math, may_be_computed
from expert_iteration.tasks.reward_mix import RewardMix

ROWS: list[dict[str, Any]] = [
    {"problem": "Half?", "solution": r"We get \boxed{3}, no: $\boxed{\frac{1}{2}}$."},
    {"problem": "Expand.", "answer": "x^2+2x+1"},
    {"problem": "Interval?", "solution": r"\boxed{(-\infty, 3)}", "answer": None},
    {"problem": "Who?", "answer": r"\text{Evelyn}"},
    {"problem": "Matrix?", "answer": r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"},
    {"problem": "Share?", "answer": r"70\%"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def task(tmp_path: Path) -> Math:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", [{"problem": "One?", "answer": "1"}])
    made = make_task("math", data_path=str(tmp_path), reward="graded")
    assert isinstance(made, Math)
    return made


def test_the_gold_is_the_answer_or_the_last_box_of_the_solution(task: Math) -> None:
    assert [prompt.gold for prompt in task.prompts("train")][:4] == [
        r"\frac{1}{2}", "x^2+2x+1", r"(-\infty, 3)", r"\text{Evelyn}",
    ]  # fmt: skip
    assert [prompt.row_id for prompt in (*task.prompts("train"), *task.prompts("test"))] == list(range(7))
    content = task.prompts("train")[0].messages[0]["content"]
    assert content.startswith("Half?") and r"\boxed{answer}" in content
    task.self_check()


@pytest.mark.parametrize("row", [{"problem": "Half?"}, {"problem": "H", "solution": "no box"}, {"answer": "1"}, [1]])
def test_rows_without_problem_or_answer_are_named(tmp_path: Path, row: Any) -> None:
    with pytest.raises(UserError, match=r"train\.jsonl row 2"):
        make_task("math", data_path=str(write(tmp_path / "train.jsonl", [ROWS[0], row])))


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}", True),
        (r"\frac{1}{2}", r"so \boxed{1/2}.", True),
        (r"\frac{1}{2}", r"so $\dfrac12$", True),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", False),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
        ("x^2+2x+1", r"\boxed{(x-1)^2}", False),
        (r"(-\infty, 3)", r"\boxed{(-\infty,3)}", True),
        (r"(-\infty, 3)", r"\boxed{(-\infty,3]}", False),
        ("1,2,3", r"\boxed{3,2,1}", True),
        ("1000", r"\boxed{1{,}000}", True),
        (r"10\sqrt{2}", r"\boxed{\sqrt{200}}", True),
        (r"\text{Evelyn}", r"\boxed{\text{ Evelyn}}", True),
        (r"\text{Evelyn}", r"\boxed{\text{Frank}}", False),
        (r"70\%", r"\boxed{70\%}", True),
        ("5", "<answer>5</answer>", True),
        ("42", r"<answer>\boxed{42}</answer>", True),
        ("5", "The answer is 5.", True),
        # The last marked answer counts, and a hedge matches nothing.
        ("5", r"\boxed{5}, no, \boxed{7}", False),
        ("7", r"\boxed{5}, no, \boxed{7}", True),
        ("5", r"\boxed{5 or 7}", False),
        ("5", r"\boxed{5,7}", False),
        ("11/2", r"\boxed{1 1/2}", False),
        ("5", r"<think>\boxed{5}</think> I do not know", False),
        ("5", r"<think>\boxed{5}", False),
        ("5", "", False),
        ("5", r"\boxed{}", False),
    ],
)  # fmt: skip
def test_equal_and_different(task: Math, gold: str, response: str, right: bool) -> None:
    assert task.score(Prompt(0, (), gold), response).details["success"] == float(right)


@pytest.mark.parametrize(
    ("response", "rewards", "details"),
    [
        (r"\boxed{20}", (1.0, 1.0), (1, 1, 1, 1)),
        ("It is 20", (0.9, 1.0), (1, 0, 1, 1)),
        # Off by 5 of 20: closeness 3/4. 0.1 + 0.05 * 3/4 + 0.05
        (r"\boxed{15}", (0.1875, 0.0), (0, 1, 0.75, 1)),
        ("#### 15", (0.0875, 0.0), (0, 0, 0.75, 1)),
        (r"\boxed{x}", (0.15, 0.0), (0, 1, 0, 1)),
        ("", (0.0, 0.0), (0, 0, 0, 0)),
        ("x" * 3991 + r"\boxed{20}", (0.95, 1.0), (1, 1, 1, 0)),
    ],
)  # fmt: skip
def test_reward_by_hand(
    task: Math, tmp_path: Path, response: str, rewards: tuple[float, float], details: tuple[float, float, float, float]
) -> None:
    for mode, expected in zip(("graded", "exact"), rewards, strict=True):
        score = make_task("math", data_path=str(tmp_path), reward=mode).score(Prompt(0, (), "20"), response)
        assert score.reward == pytest.approx(expected, abs=1e-12)
        assert score.details == dict(zip(("success", "format", "closeness", "length"), details, strict=True))


@pytest.mark.parametrize(
    "answer",
    ["9**9**9**9", "9^{9^{9^{9}}}", "9^9^9", "9^{99999}", "2^{-99999999}", "10000!", "9!!", "(9!)!", "9!^9"],
)
@pytest.mark.parametrize("shape", [r"\boxed{%s}", "The answer is $%s$.", "%s"])
def test_EI_29_powers_that_take_for_ever_are_wrong_at_once(task: Math, answer: str, shape: str) -> None:
    task.score(Prompt(0, (), "9"), r"\boxed{9.0}")
    start = time.perf_counter()
    assert task.score(Prompt(0, (), "9"), shape % answer).details["success"] == 0.0
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize("answer", ["2^{2005}", "x^2y^2", "x^{10}+x^{9}+x^8", "5!", "n! + m!", r"10^{-3}"])
def test_ordinary_powers_may_be_computed(answer: str) -> None:
    assert may_be_computed(answer)


def test_EI_29_threads_score_as_the_main_thread_does(task: Math) -> None:
    some = [(Prompt(0, (), "x^2+2x+1"), rf"\boxed{{(x+1)^2 + {n}}}") for n in range(6)]
    expected = [task.score(*item).reward for item in some]
    assert expected[0] == 1.0 and max(expected[1:]) < 0.5
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda item: task.score(*item).reward, some)) == expected
    verifier = make_verifier(task, workers=1, time_limit_s=20.0)
    assert [score.reward for score in verifier.score_many(some)] == expected
    verifier.close()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(alphabet="0123456789x+-*/=^_{}()[]\\ $.,!%fracboxedsqrtpi", max_size=40), st.booleans())
def test_no_response_raises(text: str, boxed: bool) -> None:
    task = object.__new__(Math)
    task._graded, task._length_limit, task._mix = True, 4000, RewardMix(REWARD_WEIGHTS["math"], {})
    score = task.score(Prompt(0, (), "4"), rf"\boxed{{{text}}}" if boxed else text)
    assert score.reward is not None and 0.0 <= score.reward <= 1.0
