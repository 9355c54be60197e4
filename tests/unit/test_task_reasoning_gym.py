"""reasoning_gym: options, splits by text, rewards with hand-computed marks, and scorers that are not trusted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task
from expert_iteration.tasks.base import is_held_out, question_key
from expert_iteration.tasks.reasoning_gym import ReasoningGym, answer_text

CHAIN_SUM = {"generator": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def chain_sum(**arguments: Any) -> ReasoningGym:
    options = CHAIN_SUM | arguments.pop("options", {})
    return ReasoningGym(
        options=options, prompt_template="{question}", **{"train_size": 40, "test_size": 10} | arguments
    )


def small(generator: str, reward: str = "exact", size: int = 2, **options: Any) -> ReasoningGym:
    return ReasoningGym(options={"generator": generator, **options}, reward=reward, train_size=size, test_size=size)


def texts(task: ReasoningGym, split: Any) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in task.prompts(split)]


def problems_of(options: dict[str, Any], **arguments: Any) -> list[Any]:
    with pytest.raises(UserError) as caught:
        make_task("reasoning_gym", options=options, **{"train_size": 2, "test_size": 2} | arguments)
    return list(caught.value.problems)


# --- splits


def test_splits_are_disjoint_by_text_and_row_ids_unique() -> None:
    task = chain_sum(train_size=2000, test_size=256)
    train, test = task.prompts("train"), task.prompts("test")
    assert (len(train), len(test)) == (2000, 256)
    assert len({question_key(text) for text in texts(task, "train") + texts(task, "test")}) == 2256
    assert len({prompt.row_id for prompt in [*train, *test]}) == 2256
    assert train is task.prompts("train")
    task.self_check()


def test_held_out_questions_are_the_same_for_every_seed_and_training_size() -> None:
    first, second = chain_sum(seed=0), chain_sum(seed=1, train_size=400)
    assert texts(first, "test") == texts(second, "test")
    assert texts(chain_sum(options={"data_seed": 1}), "test") != texts(first, "test")


def test_training_questions_follow_the_seed() -> None:
    assert texts(chain_sum(seed=3), "train") == texts(chain_sum(seed=3), "train")
    assert texts(chain_sum(seed=3, train_size=90), "train")[:40] == texts(chain_sum(seed=3), "train")
    shared = set(texts(chain_sum(seed=3), "train")) & set(texts(chain_sum(seed=4), "train"))
    assert len(shared) < 10  # neighbouring seeds of the generator itself share 39 of 40


def test_a_larger_held_out_split_never_reaches_into_training_questions() -> None:
    trained_on = set(texts(chain_sum(train_size=2000, test_size=10), "train"))
    assert not trained_on & set(texts(chain_sum(train_size=1, test_size=1000), "test"))


def test_the_share_of_held_out_questions() -> None:
    held_out = sum(is_held_out(f"question {index}", 0) for index in range(5000))
    assert abs(held_out / 5000 - 0.2) < 0.02  # 3.5 standard deviations
    assert is_held_out("How  many?\n", 0) == is_held_out("how many?", 0)


def test_an_exhausted_generator_says_how_many_questions_there_are() -> None:
    # One-digit numbers, added or subtracted: 2 * 10 * 10 questions.
    options = CHAIN_SUM | {"max_digits": 1}
    problems = problems_of(options, train_size=190, test_size=100)
    assert [problem.key for problem in problems] == ["env.train_size", "env.test_size"]
    assert all("(200 for both in" in problem.constraint for problem in problems)
    num_test = int(problems[-1].way_out.split("at most ")[1].split(",")[0])
    task = make_task("reasoning_gym", options=options, train_size=200 - num_test, test_size=num_test)
    assert len(task.prompts("train")) + len(task.prompts("test")) == 200


# --- rewards


EXACT, GRADED = (chain_sum(train_size=1000, reward=reward) for reward in ("exact", "graded"))


def numeric_marks(gold: int, response: str) -> tuple[float | None, float | None]:
    """Exact and graded reward of a response to the first training problem whose gold answer is `gold`."""
    prompt = next(prompt for prompt in EXACT.prompts("train") if prompt.gold == str(gold))
    return EXACT.score(prompt, response).reward, GRADED.score(prompt, response).reward


@pytest.mark.parametrize(
    ("response", "exact", "graded"),
    [
        ("The answer is 20", 1.0, 1.0),
        ("20", 1.0, 1.0),
        ("20.0", 1.0, 1.0),
        ("11 + 9 = 20.", 1.0, 1.0),
        ("#### 20", 1.0, 1.0),
        ("<answer>20</answer> or 19", 1.0, 1.0),
        ("20 or 19", 0.0, 0.475),  # 0.5 * (1 - 1 / 20)
        ("15", 0.0, 0.375),  # 0.5 * (1 - 5 / 20)
        ("-20", 0.0, 0.0),
        ("40", 0.0, 0.0),
        ("1e999999999", 0.0, 0.0),
        ("twenty", 0.0, 0.0),
        ("40/2", 0.0, 0.5),  # equal, but no number: a fraction may be the question itself
        ("<think>20", 0.0, 0.0),
        ("<think>19</think>20", 1.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_marks_for_a_gold_of_20(response: str, exact: float, graded: float) -> None:
    assert numeric_marks(20, response) == (exact, graded)


def test_marks_for_a_small_gold_are_measured_against_ten() -> None:
    assert numeric_marks(4, "5") == (0.0, 0.45)
    assert numeric_marks(4, "14") == (0.0, 0.0)


def test_details_tell_success_and_graded_marks_in_either_mode() -> None:
    task = chain_sum()
    prompt = task.prompts("train")[0]
    assert task.score(prompt, str(prompt.gold)).details == {"success": 1.0, "graded": 1.0}
    assert task.score(prompt, "none").details == {"success": 0.0, "graded": 0.0}


def test_a_fraction_to_be_simplified_is_not_right_as_it_stands() -> None:
    task = small("fraction_simplification", styles=["plain"])
    prompt = task.prompts("train")[0]
    metadata = task._rows[prompt.row_id].entry["metadata"]
    assert task.score(prompt, f"{metadata['numerator']}/{metadata['denominator']}").reward == 0.0
    assert task.score(prompt, f"So it is {prompt.gold}").reward == 1.0


@pytest.mark.parametrize(
    ("generator", "options", "is_one_number", "wrong"),
    [
        ("base_conversion", {}, str.isdigit, "{}e"),
        ("prime_factorization", {}, str.isdigit, "3 × {}"),
        ("polynomial_equations", {"min_degree": 1, "max_degree": 1}, lambda gold: "," not in gold, "7.5, {}"),
        ("manipulate_matrix", {}, str.isdigit, "5 {}"),
    ],
)
def test_an_answer_that_happens_to_be_one_number_is_no_last_number(
    generator: str, options: dict[str, Any], is_one_number: Any, wrong: str
) -> None:
    task = small(generator, size=20, **options)
    prompts = [prompt for split in ("train", "test") for prompt in task.prompts(split) if is_one_number(prompt.gold)]
    assert prompts
    for prompt in prompts:
        assert task.score(prompt, wrong.format(prompt.gold)).reward in (0.0, None)
        assert task.score(prompt, prompt.gold).reward == 1.0


def test_an_absolute_tolerance_does_not_make_a_small_number_right() -> None:
    task = small("coin_flip", min_trials=14, max_trials=14, size=4)
    prompt = min((*task.prompts("train"), *task.prompts("test")), key=lambda prompt: float(prompt.gold))
    rare = task._rows[prompt.row_id]
    rare.entry["answer"] = "6.103515625e-05"  # 2^-14; the scorer takes all within 1e-4 for right
    assert task.score(prompt, "0").reward == 0.0
    assert task.score(prompt, "3.05e-05").reward == 0.0
    assert task.score(prompt, "6.1e-05").reward == 1.0
    assert task.score(prompt, "6.103515625e-05").reward == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I think <answer>a b</answer>", "a b"),
        ("<answer>a</answer>, no: <answer>b</answer>. Answer: c", "b"),
        ("Some steps.\n**Final Answer:** knave ", "knave"),
        ("Answer: x\nanswer: y\nz", "y\nz"),
        ("  as it stands\n", "as it stands"),
        ("<answer>not closed", "<answer>not closed"),
    ],
)
def test_answer_text(text: str, answer: str) -> None:
    assert answer_text(text) == answer


def test_text_answers_get_the_generators_own_marks() -> None:
    exact, graded = small("time_intervals", task_types=["date"]), small("time_intervals", "graded", task_types=["date"])
    prompt = exact.prompts("train")[0]
    days = int(prompt.gold.split()[0])
    # The generator's marks: 1 - difference / max_date_difference_days, which is 100.
    near_miss = f"Answer: {days + 10} days"
    assert exact.score(prompt, near_miss).reward == 0.0
    assert graded.score(prompt, near_miss).reward == pytest.approx(0.9)
    assert exact.score(prompt, f"Answer: {prompt.gold}").reward == 1.0


@pytest.mark.parametrize("generator", ["gcd", "letter_counting", "spell_backward", "word_sorting", "syllogism"])
@pytest.mark.parametrize("reward", ["exact", "graded"])
def test_gold_answers_score_the_maximum(generator: str, reward: str) -> None:
    task = small(generator, reward, size=5)
    task.self_check()
    for prompt in task.prompts("train"):
        for response in ("Answer: {}", "Well. <answer>{}</answer>", "<think>1</think>{}"):
            assert task.score(prompt, response.format(prompt.gold)).reward == 1.0


def test_a_wrong_text_is_not_right_for_a_scorer_that_accepts_any() -> None:
    task = small("game_of_life_halting")
    prompt = task.prompts("train")[0]
    assert task.score(prompt, "zzz").reward == 0.0
    assert task.score(prompt, prompt.gold).reward == 1.0


def test_saying_nothing_is_never_right() -> None:
    task = small("ab", size=100)
    task.self_check()
    assert all(prompt.gold != "" for split in ("train", "test") for prompt in task.prompts(split))


def test_a_scorer_that_fails_leaves_the_response_unscored() -> None:
    task = small("prime_factorization")
    prompt = next(prompt for split in ("train", "test") for prompt in task.prompts(split) if "×" in prompt.gold)
    score = task.score(prompt, "zzz")
    assert score.reward is None and score.details == {"success": 0.0}
    assert task.score(prompt, f"Answer: {prompt.gold}").reward == 1.0


def test_a_generator_without_gold_answers_is_scored_by_its_verifier() -> None:
    task = small("graph_color", num_colors=4, min_num_vertices=6, max_num_vertices=6)
    prompt = task.prompts("train")[0]
    assert prompt.gold is None
    task.self_check()
    puzzle = task._rows[prompt.row_id].entry["metadata"]["puzzle"]
    colors: dict[int, int] = {}
    for vertex in puzzle["vertices"]:
        taken = {colors.get(a if b == vertex else b) for a, b in puzzle["edges"] if vertex in (a, b)}
        colors[vertex] = next(color for color in puzzle["color_options"] if color not in taken)
    assert task.score(prompt, json.dumps(colors)).reward == 1.0
    assert task.score(prompt, json.dumps(dict.fromkeys(puzzle["vertices"], 1))).reward == 0.0


FUZZED = [chain_sum(reward="graded"), small("time_intervals", "graded"), small("string_insertion", "graded")]
PIECES = ["<answer>", "</answer>", "Answer:", "####", "(", ")", "[", "]", "'", "days", "9**9", "1/0", "-", "7", ","]


@given(st.sampled_from(FUZZED), st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4))).map("".join))
@settings(max_examples=300, deadline=None)
def test_score_never_raises_and_stays_in_range(task: ReasoningGym, text: str) -> None:
    score = task.score(task.prompts("train")[0], text)
    assert score.reward is None or 0.0 <= score.reward <= 1.0
    assert score.details["success"] in (0.0, 1.0)


# --- options


def test_an_unknown_generator_lists_close_names() -> None:
    (problem,) = problems_of({"generator": "chainsum"})
    assert problem.key == "env.options.generator" and "chain_sum" in problem.way_out
    (problem,) = problems_of({})
    assert problem.key == "env.options.generator"


def test_every_bad_option_is_reported_at_once() -> None:
    problems = problems_of({"generator": "chain_sum", "min_term": 2, "max_terms": "two", "seed": 1, "max_digits": 2.0})
    by_key = {problem.key: problem for problem in problems}
    assert set(by_key) == {
        "env.options.min_term",
        "env.options.max_terms",
        "env.options.seed",
        "env.options.max_digits",
    }
    assert "min_terms" in by_key["env.options.min_term"].way_out
    assert "whole number" in by_key["env.options.max_terms"].constraint
    assert "data_seed" in by_key["env.options.seed"].way_out


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"generator": "chain_sum", "min_terms": 0}, {"env.options.min_terms"}),
        (
            {"generator": "chain_sum", "min_terms": 4, "max_terms": 2},
            {"env.options.min_terms", "env.options.max_terms"},
        ),
        ({"generator": "chain_sum", "data_seed": -1}, {"env.options.data_seed"}),
        ({"generator": "chain_sum", "allow_negation": 1}, {"env.options.allow_negation"}),
        ({"generator": "basic_arithmetic", "format_style": "odd"}, {"env.options.format_style"}),
        ({"generator": "word_sorting", "transformation": "shouted"}, {"env.options.transformation"}),
        ({"generator": "time_intervals", "min_date": "yesterday"}, {"env.options.min_date"}),
        ({"generator": "simple_equations", "operators": "+"}, {"env.options.operators"}),
        ({"generator": "coin_flip", "min_trials": 0}, {"env.options.min_trials"}),
        ({"generator": "composite", "datasets": [{"name": "gcd"}]}, {"env.options.datasets"}),
    ],
)
def test_bad_values_are_reported_by_key(options: dict[str, Any], keys: set[str]) -> None:
    assert {problem.key for problem in problems_of(options)} == keys


def test_options_take_effect() -> None:
    for text in texts(chain_sum(), "train"):
        numbers = [int(word) for word in text.split() if word.isdigit()]
        assert len(numbers) == 2 and max(numbers) < 100


@pytest.mark.parametrize(
    "options",
    [
        {"generator": "word_sorting", "transformation": "uppercase"},
        {"generator": "time_intervals", "min_date": "2000-01-01", "max_date": "2001-01-01", "task_types": ["date"]},
        {"generator": "basic_arithmetic", "operators": ["+"]},
        {"generator": "aiw", "task_types": ["siblings"], "task_type_weights": [1]},
        {
            "generator": "composite",
            "datasets": [
                {"name": "gcd", "weight": 1, "config": {}},
                {"name": "string_insertion", "weight": 1, "config": {"max_string_length": 8}},
            ],
        },
    ],
    ids=lambda options: options["generator"],
)
def test_options_of_every_kind_are_converted(options: dict[str, Any]) -> None:
    task = make_task("reasoning_gym", options=options, train_size=4, test_size=2)
    task.self_check()
    assert len(task.prompts("train")) == 4


def test_data_path_and_template_are_checked() -> None:
    with pytest.raises(UserError, match=r"env\.data_path"):
        make_task("reasoning_gym", options=CHAIN_SUM, data_path="rows.jsonl")
    assert problems_of(CHAIN_SUM, prompt_template="What?")[0].key == "env.prompt_template"
