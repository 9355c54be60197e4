"""Extraction and exact comparison of numeric answers, on the cases from the field and on hand-made ones."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_iteration.tasks.answers import closeness, find_numbers, parse_number, strip_reasoning
from expert_iteration.tasks.gsm8k import answers_match, extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{$9{,}500}", "9500"),
        (r"\boxed{8,000}", "8000"),
        ("That makes 72 clips, altogether.", "72"),
        ("Final: **73**", "73"),
        (r"**Answer: \$18 per day.**", "18"),
        ("#### $18", "18"),
        ("####72", "72"),
        ("#### $72", "72"),
        ("boxes of 3 4", "4"),
        ("18,", "18"),
    ],
)
def test_EI_25_separators_currency_markdown(text: str, answer: str) -> None:
    assert extract_answer(text) == answer
    assert answers_match(answer, answer)


@pytest.mark.parametrize("answer", [r"\$18", "**18**", "18 dollars", r"\boxed{18}", r"\boxed{18\text{ dollars}}"])
def test_EI_25_markup_around_a_number_is_no_part_of_it(answer: str) -> None:
    assert answers_match(answer, "18")


def test_EI_25_locale_is_not_guessed() -> None:
    assert answers_match("9{,}500", "9500")
    assert not answers_match("70.000", "70000")
    assert answers_match("70.000", "70")
    assert not answers_match("1,5", "1.5")


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("-3", "-3", True),
        ("\u22123", "-3", True),
        ("3", "-3", False),
        ("18.00", "18", True),
        ("+18", "18", True),
        ("18.", "18", True),
        ("36/2", "18", True),
        ("1.8e1", "18", True),
        ("-18", "18", False),
        (".5", "0.5", True),
        ("0.50", "0.5", True),
        ("1/2", "0.5", True),
        ("5%", "5", True),
        ("-0", "0", True),
        ("9007199254740993", "9007199254740992", False),
        ("1e400", "1e999", False),
        ("1e400", "10e399", True),
    ],
)
def test_EI_26_sign_and_exact_equality(answer: str, gold: str, right: bool) -> None:
    assert answers_match(answer, gold) is right
    extracted = extract_answer(f"So it is {answer}")
    assert extracted is not None and answers_match(extracted, gold) is right


def test_EI_26_a_hyphen_between_numbers_is_no_sign() -> None:
    assert extract_answer("7-5") == "5"
    assert extract_answer("from 20-25") == "25"
    assert extract_answer("(2)-5") == "5"
    assert extract_answer("a loss of 7-$5") == "5"
    assert extract_answer("a balance of -$5") == "-5"


@pytest.mark.parametrize("answer", ["nan", "inf", "-Infinity", "1/0", "9" * 5000, "0." + "3" * 5000, "1e999999999", ""])
@pytest.mark.parametrize("gold", ["0", "18", "nan", "inf", "1/0"])
def test_EI_26_never_right_and_never_an_exception(answer: str, gold: str) -> None:
    started = time.perf_counter()
    assert not answers_match(answer, gold)
    extract_answer(f"#### {answer}")
    assert closeness(answer, gold) == 0.0
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer> no, <answer>7</answer>", "7"),
        (r"\boxed{840} ... \boxed{840}", "840"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{-\frac{1}{2}}", "-1/2"),
        ("#### 5 ... #### 7", "7"),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"<answer>3 + 4 = \boxed{7}</answer>", "7"),
        ("<think>#### 9</think> #### 7", "7"),
        (r"#### 5 or rather \boxed{7}", "7"),
        (r"\boxed{7} so #### 5", "5"),
        (r"\boxed{7} and \boxed{12", "7"),
        ("<answer>7</answer> <answer>12", "7"),
        ("<answer>7</answer><answer></answer>", "7"),
    ],
)
def test_EI_27_the_last_complete_answer_wins(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


def test_EI_27_a_hedge_is_right_for_no_gold() -> None:
    for hedge in ("<answer>5 or 7</answer>", r"\boxed{5, 7}", "#### 5 or 7"):
        extracted = extract_answer(hedge)
        assert extracted is not None
        assert not answers_match(extracted, "5") and not answers_match(extracted, "7")


@pytest.mark.parametrize(
    ("text", "rest"),
    [("<think>a 1</think>b", "b"), ("a 1</think>b", "b"), ("b<think>1", "b"), ("<think>1", ""), ("b", "b")],
)
def test_reasoning_is_dropped_whether_or_not_its_tags_are_complete(text: str, rest: str) -> None:
    assert strip_reasoning(text) == rest


def test_a_response_cut_off_in_its_reasoning_has_no_answer() -> None:
    assert extract_answer("<think>so far 18") is None


def test_a_markdown_heading_is_no_marked_answer() -> None:
    assert extract_answer("#### Step 1: add\n3 + 4 = 7\n#### 7\n") == "7"
    assert extract_answer("#### Step 1: 3 + 4 = 7 apples") == "7"
    assert extract_answer("##### 3\nThen 4") == "4"


def test_numbers_inside_words_and_after_dots() -> None:
    assert find_numbers("x2 H2O 3km v1.5 1,234,567.5 1,23 ...18 a_4") == ["3", "1234567.5", "1", "23", "18"]


def test_parse_number_takes_exactly_one_number() -> None:
    assert parse_number("2.5/5") == Fraction(1, 2)
    assert parse_number("-1.25e-2") == Fraction(-1, 80)
    assert parse_number("1 1/2") is None
    assert parse_number("none") is None


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("72", "72", 1.0),
        ("90", "72", 0.75),  # off by 18 of 72
        ("144", "72", 0.0),
        ("1000", "72", 0.0),
        ("3", "5", 0.8),  # small golds are measured against ten
        ("5", "0", 0.5),
        ("-80", "-100", 0.8),
        (None, "72", 0.0),
        ("5 or 7", "5", 0.0),
    ],
)
def test_closeness_by_hand(answer: str | None, gold: str, expected: float) -> None:
    assert closeness(answer, gold) == expected


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" * 50_000, "<answer>" * 50_000, "</answer>" * 50_000, "####" * 50_000, "1,234" * 50_000, "1/" * 100_000],
    ids=["boxed", "open", "close", "hashes", "thousands", "slashes"],
)
def test_extraction_takes_linear_time(text: str) -> None:
    started = time.process_time()
    extract_answer(text)
    assert time.process_time() - started < 20


FRAGMENTS = ["####", "\\boxed{", "}", "<answer>", "</answer>", "<think>", "</think>", "-", "$", ",", ".", "/", "e", "1"]


@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4))).map("".join))
@settings(max_examples=300, deadline=None)
def test_extraction_never_raises_and_a_found_number_matches_itself(text: str) -> None:
    answer = extract_answer(text)
    if answer is not None and parse_number(answer) is not None:
        assert answers_match(answer, answer) and closeness(answer, answer) == 1.0


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "It is {}."])
)
@settings(max_examples=200, deadline=None)
def test_every_integer_survives_every_convention_with_and_without_separators(number: int, convention: str) -> None:
    for written in (str(number), f"{number:,}"):
        assert extract_answer("First 5, then " + convention.format(written)) == str(number)
