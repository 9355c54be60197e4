"""Model output never reaches an `eval`, and what the scorers accept still does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from expert_iteration.config.derived import SLOW_SCORERS
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
        "__import__('os').system('true') #" + "x" * 3000,
        "__import__('os').system('true')" + " " * 3000,
        "1+" * 3000 + "__import__('os').system('true')",
        "oracle_answer",
        "[entry, answer]",
        "self",
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
        ("string_insertion", "[A, B]"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("simple_integration", "exp(2*x)**2/4 + exp(x**2) + 0.5*x"),
        ("simple_integration", "E**(-x**2/2) + 2**(3*x)/3 + (x**(3/2))**2 - x**(-1)"),
        ("rubiks_cube", "R U2 F' R2 D"),
        ("rush_hour", "F+1 K+1 M-1 C+3 H+2"),
        ("number_sorting", "['-12', '3.5', '40']"),
        ("complex_arithmetic", "3.0 - 2.0i"),
        ("propositional_logic", "(P ∨ ¬Q)"),
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


@pytest.mark.parametrize(
    ("generator", "response"),
    [
        ("countdown", "(6 + 98)*0e0 + 100e0"),
        ("countdown", "0x64"),
        ("countdown", "1_00"),
        ("countdown", "1.5*2"),
        ("countdown", "1e999999999"),
        ("puzzle24", "1e-999999999"),
        ("simple_integration", "1e999999999*x"),
        ("simple_integration", "x*exp(exp(exp(9)))"),
        ("simple_integration", "(x + y)**20**20"),
        ("simple_integration", "(x + y)**((10 + 10)**20)"),
        ("simple_integration", "(x + y)**(20*20*20*20)"),
        ("simple_integration", "(x + y)**(1/0.1)"),
        ("simple_integration", "(x + y)**(1/True)"),
        ("simple_integration", "(x + y)**0.001"),
        ("simple_integration", "(x + y)**21"),
        ("simple_integration", "sinh(cosh(exp(x)))"),
        ("rubiks_cube", "R999999999"),
        ("rubiks_cube", "R9999 U9999"),
        ("rubiks_cube", "R " * 20_000),
        ("rush_hour", "A+999999999"),
        ("number_sorting", "[NaN, NaN]"),
        ("number_sorting", "['nan']"),
        ("complex_arithmetic", "NaN"),
        ("complex_arithmetic", "1 + nani"),
        ("boxnet", '[{"a": "move(' + ", " * 10_000 + '"}]'),
        ("propositional_logic", "¬" * 2000 + "P"),
        ("chain_sum", "1" * 200_000),
    ],
    ids=lambda value: value[:20],
)
def test_what_would_run_long_or_escape_a_check_is_refused(generator: str, response: str) -> None:
    assert not may_be_scored(generator, response)


def test_padding_does_not_carry_code_past_the_guard(tmp_path: Path) -> None:
    task = ReasoningGym(options={"generator": "string_insertion"}, train_size=1, test_size=1)
    file = tmp_path / "written"
    response = f"open({str(file)!r}, 'w') #" + "x" * 3000
    assert task.score(task.prompts("train")[0], response).reward == 0.0
    assert not file.exists()


def test_a_variable_of_the_scorer_is_no_answer() -> None:
    task = ReasoningGym(options={"generator": "string_insertion"}, reward="graded", train_size=1, test_size=1)
    prompt = task.prompts("train")[0]
    assert task.score(prompt, "oracle_answer").reward == 0.0
    assert task.score(prompt, str(list(prompt.gold))).reward == pytest.approx(0.1)  # the generator's own marks


def test_countdown_counts_every_number() -> None:
    task = ReasoningGym(options={"generator": "countdown", "max_numbers": 4}, train_size=1, test_size=1)
    prompt = task.prompts("train")[0]
    metadata = task._rows[prompt.row_id].entry["metadata"]
    used = "+".join(map(str, metadata["numbers"]))
    assert task.score(prompt, f"({used})*0e0 + {metadata['target']}e0").reward == 0.0
    assert task.score(prompt, f"  {prompt.gold} \n").reward == 1.0


def test_puzzle24_takes_its_own_four_numbers_and_exactly_24() -> None:
    task = ReasoningGym(options={"generator": "puzzle24"}, train_size=20, test_size=1)
    for prompt in task.prompts("train"):
        a, *others = task._rows[prompt.row_id].entry["metadata"]["numbers"]
        other = "6*4*1*1" if sorted([a, *others]) != [1, 1, 4, 6] else "8*3*1*1"
        assert task.score(prompt, other).reward == 0.0
        assert task.score(prompt, prompt.gold).reward == 1.0
    task._rows[prompt.row_id].entry["metadata"]["numbers"] = [1, 2, 7, 7]
    assert task.score(prompt, "7*7/2*1").reward == 0.0  # 24.5, which the generator's scorer rounds down
    task._rows[prompt.row_id].entry["metadata"]["numbers"] = [3, 3, 8, 8]
    assert task.score(prompt, "8/(3 - 8/3)").reward == 1.0


@pytest.mark.parametrize("text", ["[NaN, NaN, NaN]", "['nan', 'nan', 'nan']"])
def test_numbers_that_are_none_are_not_sorted(text: str) -> None:
    options = {"generator": "number_sorting", "min_numbers": 3, "max_numbers": 3}
    task = ReasoningGym(options=options, train_size=1, test_size=1)
    assert task.score(task.prompts("train")[0], text).reward == 0.0


def test_scorers_that_simplify_formulas_are_slow_ones() -> None:
    assert set(SLOW_SCORERS) >= ALGEBRA_SCORERS
