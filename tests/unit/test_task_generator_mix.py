"""Several generators in one task: shares by weight, splits by text over all of them, and success of each."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks import make_task
from expert_iteration.tasks.base import is_held_out, question_key
from expert_iteration.tasks.generator_mix import shares
from expert_iteration.tasks.reasoning_gym import ReasoningGym

EASY = {"generator": "chain_sum", "weight": 3, "max_terms": 2, "min_digits": 1, "max_digits": 1}
HARD = {"generator": "chain_sum", "min_digits": 3, "max_digits": 3}
WORDS = {"generator": "spell_backward", "weight": 1.0}


def mix(*entries: dict[str, Any], train_size: int = 25, test_size: int = 10, **arguments: Any) -> ReasoningGym:
    options = {"generators": list(entries)} | arguments.pop("options", {})
    return ReasoningGym(options=options, train_size=train_size, test_size=test_size, **arguments)


def problems_of(options: dict[str, Any], dataset: str = "reasoning_gym", **sizes: int) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        make_task(dataset, options=options, **{"train_size": 10, "test_size": 5} | sizes)
    return list(caught.value.problems)


def labels(task: ReasoningGym, split: Any) -> list[str]:
    """Which generator each row comes from, as its score says."""
    return [
        name.removeprefix("success.")
        for prompt in task.prompts(split)
        for name in task.score(prompt, "").details
        if name.startswith("success.")
    ]


def texts(task: ReasoningGym, split: Any) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in task.prompts(split)]


# --- shares


@pytest.mark.parametrize(
    ("size", "weights", "expected"),
    [
        (10, [1], [10]),
        (10, [3, 1], [8, 2]),  # 7.5 and 2.5: of equal remainders the first
        (10, [1, 1, 1], [4, 3, 3]),
        (100, [47_000, 16_000, 15_800, 12_000, 6_100, 3_100], [47, 16, 16, 12, 6, 3]),
        (3, [0.1, 0.2], [1, 2]),
        (1, [1, 100], [0, 1]),
    ],
)
def test_shares_by_the_largest_remainder(size: int, weights: list[float], expected: list[int]) -> None:
    assert shares(size, weights) == expected


@given(st.integers(1, 10_000), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_shares_add_up_and_differ_from_the_quota_by_less_than_one(size: int, weights: list[float]) -> None:
    parts = shares(size, weights)
    assert sum(parts) == size
    assert all(abs(part - size * weight / sum(weights)) < 1 + 1e-6 for part, weight in zip(parts, weights, strict=True))


# --- rows


def test_each_generator_gets_its_share_of_either_split() -> None:
    task = mix(EASY, HARD, WORDS)
    train, test = labels(task, "train"), labels(task, "test")
    assert {label: train.count(label) for label in train} == {"chain_sum_1": 15, "chain_sum_2": 5, "spell_backward": 5}
    assert {label: test.count(label) for label in test} == {"chain_sum_1": 6, "chain_sum_2": 2, "spell_backward": 2}
    assert train != sorted(train)  # the rows of one generator do not stand together
    task.self_check()


def test_a_weight_is_1_where_none_is_given() -> None:
    task = mix({"generator": "gcd"}, {"generator": "lcm", "weight": 4})
    assert (labels(task, "train").count("gcd"), labels(task, "train").count("lcm")) == (5, 20)


def test_the_options_of_an_entry_are_its_own() -> None:
    task = mix(EASY, HARD)
    for label, prompt in zip(labels(task, "train"), task.prompts("train"), strict=True):
        numbers = [word for word in prompt.messages[-1]["content"].partition("=")[0].split() if word.isdigit()]
        assert {len(number) for number in numbers} == ({1} if label == "chain_sum_1" else {3})


def test_splits_are_disjoint_by_text_over_all_generators_and_row_ids_unique() -> None:
    task = mix(EASY, HARD, WORDS, train_size=100, test_size=40, prompt_template="{question}")
    assert not {*map(question_key, texts(task, "train"))} & {*map(question_key, texts(task, "test"))}
    assert all(is_held_out(text, 0) for text in texts(task, "test"))
    assert not any(is_held_out(text, 0) for text in texts(task, "train"))
    row_ids = [prompt.row_id for split in ("train", "test") for prompt in task.prompts(split)]
    assert len(set(row_ids)) == 140


def test_a_question_that_two_generators_ask_is_taken_once() -> None:
    one_digit = {"generator": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = mix(one_digit, one_digit, train_size=100, test_size=20)
    assert len({*texts(task, "train")}) == 100 and len({*texts(task, "test")}) == 20
    assert labels(task, "train").count("chain_sum_2") == 50
    # 200 questions in all, of which the first half of the rows leaves the second too few.
    (problem, *_) = problems_of({"generators": [one_digit, one_digit]}, train_size=190, test_size=20)
    assert problem.key == "env.train_size" and "chain_sum_2 has only" in problem.constraint


def test_rows_and_their_order_follow_from_the_seeds() -> None:
    first, again, other = (mix(EASY, HARD, seed=seed) for seed in (3, 3, 4))
    assert texts(first, "train") == texts(again, "train") and labels(first, "train") != labels(other, "train")
    assert not set(texts(first, "train")) >= set(texts(other, "train"))
    assert texts(first, "test") == texts(other, "test") and labels(first, "test") == labels(other, "test")
    held_out_by_another_seed = mix(EASY, HARD, options={"data_seed": 1})
    assert texts(held_out_by_another_seed, "test") != texts(first, "test")


def test_a_list_of_one_generator_is_that_generator() -> None:
    alone = ReasoningGym(options={"generator": "gcd", "max_value": 50}, train_size=20, test_size=5)
    listed = mix({"generator": "gcd", "max_value": 50, "weight": 7}, train_size=20, test_size=5)
    for split in ("train", "test"):
        assert list(listed.prompts(split)) == list(alone.prompts(split))
    prompt = listed.prompts("train")[0]
    assert listed.score(prompt, prompt.gold) == alone.score(prompt, prompt.gold)


# --- success of each generator


def test_success_is_told_for_the_generator_of_the_row_alone() -> None:
    task = mix(EASY, WORDS, reward="graded")
    for label, prompt in zip(labels(task, "train"), task.prompts("train"), strict=True):
        right, wrong = task.score(prompt, f"<answer>{prompt.gold}</answer>"), task.score(prompt, "<answer>?</answer>")
        assert right.details == {"success": 1.0, f"success.{label}": 1.0, "graded": 1.0}
        assert wrong.details["success"] == wrong.details[f"success.{label}"] == 0.0
        assert {name for name in wrong.details if name.startswith("success.")} == {f"success.{label}"}


def test_an_unscored_response_names_its_generator_too() -> None:
    task = mix({"generator": "prime_factorization"}, WORDS)
    prompt = next(prompt for prompt in task.prompts("train") if "×" in prompt.gold)
    score = task.score(prompt, "zzz")
    assert score.reward is None and score.details == {"success": 0.0, "success.prime_factorization": 0.0}


def test_a_pickled_mix_scores_as_the_mix_does() -> None:
    task = mix({"generator": "string_manipulation"}, EASY, train_size=8, test_size=8)
    copy = pickle.loads(pickle.dumps(task))
    for prompt in task.prompts("train"):
        for response in (prompt.gold, "17", ""):
            assert copy.score(prompt, response) == task.score(prompt, response)


# --- what is refused


GCD = {"generator": "gcd"}


@pytest.mark.parametrize(
    ("entry", "keys"),
    [
        (GCD | {"weight": 0}, {"weight"}),
        (GCD | {"weight": -1.5}, {"weight"}),
        (GCD | {"weight": "2"}, {"weight"}),
        (GCD | {"weight": True}, {"weight"}),
        (GCD | {"weight": None}, {"weight"}),
        (GCD | {"weight": float("nan")}, {"weight"}),
        (GCD | {"weight": float("inf")}, {"weight"}),
        (GCD | {"weight": 0, "max_valu": 3, "min_value": "x"}, {"weight", "max_valu", "min_value"}),
        ({"generator": "gdc"}, {"generator"}),
        ({"weight": 2}, {"generator"}),
        (GCD | {"data_seed": 1}, {"data_seed"}),
        (GCD | {"size": 10}, {"size"}),
        (GCD | {"min_value": 9, "max_value": 3}, {"min_value", "max_value"}),
    ],
)
def test_what_is_wrong_with_an_entry_is_reported_by_its_key(entry: dict[str, Any], keys: set[str]) -> None:
    problems = problems_of({"generators": [GCD, entry]})
    assert {problem.key for problem in problems} == {f"env.options.generators[1].{key}" for key in keys}


def test_every_entry_is_reported_at_once() -> None:
    problems = problems_of({"generators": ["gcd", GCD | {"weight": 0}, GCD | {"depth": 2}]})
    assert [problem.key for problem in problems] == [
        "env.options.generators[0]",
        "env.options.generators[1].weight",
        "env.options.generators[2].depth",
    ]


@pytest.mark.parametrize("listed", [[], "gcd", {"gcd": 1}, 3])
def test_generators_have_to_be_a_list_with_entries(listed: Any) -> None:
    (problem,) = problems_of({"generators": listed})
    assert problem.key == "env.options.generators"


def test_nothing_else_may_stand_beside_the_list() -> None:
    problems = problems_of({"generators": [GCD], "generator": "lcm", "max_value": 3})
    assert {problem.key for problem in problems} == {"env.options.generator", "env.options.max_value"}
    task = make_task(
        "reasoning_gym", options={"generators": [GCD], "generator": None, "data_seed": 2}, train_size=2, test_size=1
    )
    assert len(task.prompts("train")) == 2


def test_a_share_of_less_than_one_row_is_refused() -> None:
    problems = problems_of({"generators": [GCD | {"weight": 99}, GCD]}, train_size=200, test_size=10)
    assert [(problem.key, problem.value) for problem in problems] == [("env.options.generators[1].weight", 1.0)]
    assert "env.test_size=10" in problems[0].constraint


def test_an_exhausted_generator_names_a_size_that_is_enough() -> None:
    # 200 questions of which some 160 are training questions; they are to be three quarters of the rows.
    one_digit = EASY | {"min_terms": 2}
    (problem,) = problems_of({"generators": [one_digit, GCD]}, train_size=400, test_size=5)
    assert problem.key == "env.train_size" and "its share is 300" in problem.constraint
    assert "env.options.generators[0]" in problem.way_out
    most = int(problem.way_out.split("at most ")[1].split(",")[0])
    task = mix(one_digit, GCD, train_size=most, test_size=5)
    assert len(task.prompts("train")) == most > 150


# --- countdown, a generator with a name of its own


def test_countdown_is_the_generator_of_that_name() -> None:
    options = {"max_numbers": 4, "data_seed": 1}
    sizes = {"train_size": 6, "test_size": 2}
    task = make_task("countdown", options=options, **sizes)
    same = make_task("reasoning_gym", options=options | {"generator": "countdown"}, **sizes)
    for split in ("train", "test"):
        assert list(task.prompts(split)) == list(same.prompts(split))
    task.self_check()
    prompt = task.prompts("train")[0]
    assert task.score(prompt, f"<answer>{prompt.gold}</answer>").reward == 1.0
    assert task.score(prompt, f"<answer>{prompt.gold} + 1</answer>").reward == 0.0


def test_countdown_needs_no_options() -> None:
    assert len(make_task("countdown", train_size=2, test_size=1).prompts("train")) == 2


@pytest.mark.parametrize("options", [{"generator": "gcd"}, {"generators": [GCD]}, {"max_number": 4}])
def test_countdown_takes_its_own_options_alone(options: dict[str, Any]) -> None:
    (problem,) = problems_of(options, dataset="countdown")
    assert problem.key == f"env.options.{next(iter(options))}"


def test_countdown_reads_no_data() -> None:
    with pytest.raises(UserError, match=r"env\.data_path"):
        make_task("countdown", data_path="rows.jsonl")
