"""Model output never reaches an `eval`, and what the scorers accept still does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from expert_iteration.tasks.reasoning_gym import ReasoningGym
from expert_iteration.tasks.response_guard import (
    ALGEBRA_SCORERS,
    ARITHMETIC_SCORERS,
    LITERAL_SCORERS,
    may_be_scored,
)

EVALUATING_SCORERS = sorted(ALGEBRA_SCORERS | ARITHMETIC_SCORERS | LITERAL_SCORERS)


@pytest.mark.parametrize("generator", EVALUATING_SCORERS)
@pytest.mark.parametrize(
    "response",
    [
        "__import__('os').system('true')",
        "().__class__.__mro__[1].__subclasses__()",
        "[0 for a in 'aaaa' for b in 'bbbb']",
        "(lambda: 1)()",
        "open('x', 'w')",
        "9**9**9**9",
        "x.diff(x)",
        "{1: 2}",
        "f'{exit()}'",
    ],
)
def test_code_is_refused(generator: str, response: str) -> None:
    assert not may_be_scored(generator, response)


@pytest.mark.parametrize(
    ("generator", "response"),
    [
        ("countdown", "6*(98 - 54) - 34 - 66"),
        ("puzzle24", "1*3*5 + 9"),
        ("polynomial_multiplication", "-417560*y**6 + 295723*y**5 + 9"),
        ("simple_integration", "-5*X**9 - 2*X**6/3 + 4*X**3 + C"),
        ("intermediate_integration", "-exp(x)*sin(x) + sqrt(x)*cos(x) + x**(3/2) + C"),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("binary_matrix", "0 1\n1 0"),
        ("n_queens", "_ Q\nQ _"),
        ("spiral_matrix", "1 2 3"),
        ("string_insertion", "['A', 'B']"),
        ("string_insertion", "AB"),
        ("chain_sum", "__import__('os')"),
    ],
)
def test_what_the_scorer_expects_passes(generator: str, response: str) -> None:
    assert may_be_scored(generator, response)


@pytest.mark.parametrize("response", ["(" * 1900, "-" * 1900 + "1", "1+" * 900 + "1", "[" * 1900, "\x00", "x" * 10_000])
@pytest.mark.parametrize("generator", EVALUATING_SCORERS)
def test_hostile_nesting_neither_raises_nor_hangs(generator: str, response: str) -> None:
    assert may_be_scored(generator, response) in (True, False)  # pytest's time limit ends what hangs


@pytest.mark.parametrize(
    ("generator", "response"),
    [("string_insertion", "open('{file}', 'w')"), ("simple_integration", "open('{file}', 'w')")],
)
def test_a_scored_response_runs_nothing(tmp_path: Path, generator: str, response: str) -> None:
    task = ReasoningGym(options={"generator": generator}, train_size=1, test_size=1)
    file = tmp_path / "written"
    assert task.score(task.prompts("train")[0], response.format(file=file)).reward == 0.0
    assert not file.exists()


def test_EI_29_a_tower_of_powers_is_wrong_at_once() -> None:
    task = ReasoningGym(options={"generator": "countdown", "max_numbers": 4}, train_size=1, test_size=1)
    prompt = task.prompts("train")[0]
    started = time.process_time()
    assert task.score(prompt, "9**9**9**9").reward == 0.0
    assert time.process_time() - started < 10
    assert task.score(prompt, prompt.gold).reward == 1.0


def test_an_integral_is_no_answer_to_itself() -> None:
    task = ReasoningGym(
        options={"generator": "intermediate_integration", "problem_types": ["cyclic"], "problem_type_weights": [1]},
        train_size=4,
        test_size=2,
    )
    task.self_check()
    prompt = task.prompts("train")[0]
    integrand = task._rows[prompt.row_id].entry["metadata"]["integrand"]
    assert task.score(prompt, f"Integral({integrand}, x)").reward == 0.0
