"""The 25 checkers against hand-made values, in both semantics."""

from __future__ import annotations

import random
import time
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_iteration.tasks.ifeval_checks import CHECKERS, SEMANTICS, argument_names, breaches, check
from expert_iteration.tasks.ifeval_checks.examples import EXAMPLES
from tests.ifeval_responses import FIXED, mutated

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("nltk", "langdetect", "punkt"))), reason="nltk, langdetect or punkt is not installed"
)

PARAGRAPHS = "length_constraints:number_paragraphs"
NTH = "length_constraints:nth_paragraph_first_word"
BULLETS = "detectable_format:number_bullet_lists"
HIGHLIGHTS = "detectable_format:number_highlighted_sections"
SECTIONS = "detectable_format:multiple_sections"
JSON = "detectable_format:json_format"
WORDS = "length_constraints:number_words"
SENTENCES = "length_constraints:number_sentences"
TWO = "combination:two_responses"
END = "startend:end_checker"
QUOTED = "startend:quotation"
NO_COMMA = "punctuation:no_comma"
FREQUENCY = "keywords:frequency"
EXISTENCE = "keywords:existence"
FORBIDDEN = "keywords:forbidden_words"
LETTER = "keywords:letter_frequency"
POSTSCRIPT = "detectable_content:postscript"
PLACEHOLDERS = "detectable_content:number_placeholders"
OPTION = "detectable_format:constrained_response"
CAPITALS = "change_case:english_capital"
LOWERCASE = "change_case:english_lowercase"
LANGUAGE = "language:response_language"


def both(instruction_id: str, kwargs: dict[str, Any], response: str) -> tuple[bool, bool]:
    """Verdicts of reference and repaired."""
    reference, repaired = (check(instruction_id, kwargs, response, semantics=semantics) for semantics in SEMANTICS)
    return reference, repaired


def test_there_are_25_instruction_types_each_with_an_example() -> None:
    assert len(CHECKERS) == 25
    assert EXAMPLES.keys() == CHECKERS.keys()
    assert argument_names(NTH) == ("num_paragraphs", "nth_paragraph", "first_word")
    assert argument_names(NO_COMMA) == ()


@pytest.mark.parametrize("instruction_id", CHECKERS)
def test_each_example_follows_or_breaks_its_instruction(instruction_id: str) -> None:
    example = EXAMPLES[instruction_id]
    assert breaches(instruction_id, example.kwargs) == []
    assert both(instruction_id, example.kwargs, example.follows) == (True, True)
    assert both(instruction_id, example.kwargs, example.breaks) == (False, False)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_EI_30_what_cannot_be_checked_does_not_pass(semantics: Any) -> None:
    def verdict(instruction_id: str, kwargs: dict[str, Any], response: str) -> bool:
        return check(instruction_id, kwargs, response, semantics=semantics)

    assert verdict("keywords:unknown", {}, "text") is False
    less_than_three = {"relation": "less than", "num_words": 3}
    assert verdict(WORDS, less_than_three, "a b c") is False
    assert verdict(WORDS, less_than_three, "a b") is True
    assert verdict(WORDS, {"relation": "roughly", "num_words": 3}, "a b") is False
    assert verdict(NO_COMMA, {}, "") is False
    assert verdict(NO_COMMA, {}, "  \n") is False
    assert verdict(OPTION, {}, "a") is False
    for instruction_id, example in EXAMPLES.items():
        assert verdict(instruction_id, example.kwargs, "") is False
        assert verdict(instruction_id, example.kwargs, " \n\t") is False
        for name in argument_names(instruction_id):
            assert verdict(instruction_id, {**example.kwargs, name: None}, example.follows) is False


def test_EI_30_breaches_say_what_is_wrong() -> None:
    assert breaches("keywords:unknown", {}) == ["'keywords:unknown' is no instruction of IFEval"]
    assert breaches(["a"], {}) == ["['a'] is no instruction of IFEval"]
    (relation,) = breaches(WORDS, {"relation": "roughly", "num_words": 3})
    assert "relation='roughly' has to be 'less than' or 'at least'" in relation
    assert len(breaches(WORDS, {"relation": 3, "num_words": True})) == 2
    assert breaches(WORDS, {"num_words": 3}) == [f"{WORDS} needs 'relation'"]
    assert breaches(NO_COMMA, []) and breaches(EXISTENCE, {"keywords": []}) and breaches(EXISTENCE, {"keywords": "war"})
    assert breaches(LANGUAGE, {"language": "xx"}) and breaches(LETTER, {**EXAMPLES[LETTER].kwargs, "letter": "ab"})
    assert breaches(NTH, {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"})
    assert breaches(NTH, {"num_paragraphs": 2, "nth_paragraph": 0, "first_word": "a"})
    assert breaches(END, {"end_phrase": " "}) and breaches(BULLETS, {"num_bullets": -1})


def test_unknown_semantics_are_refused() -> None:
    with pytest.raises(ValueError, match="semantics"):
        check(NO_COMMA, {}, "text", semantics="strict")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("instruction_id", "kwargs", "response", "reference", "repaired"),
    [
        (
            NTH,
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Second"},
            "First one.\n\n\n\nSecond, two.",
            0,
            1,
        ),
        (NTH, {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "First"}, "\n\nFirst one.\n\nSecond, two.", 0, 1),
        (PARAGRAPHS, {"num_paragraphs": 2}, "A\n***\nB", 1, 1),
        (PARAGRAPHS, {"num_paragraphs": 1}, "A ***bold*** text", 0, 1),
        (BULLETS, {"num_bullets": 1}, "**Head**\n* a", 1, 1),
        (BULLETS, {"num_bullets": 1}, "* a\n* b", 0, 0),
        (TWO, {}, "A\n******\nB", 1, 1),
        (TWO, {}, "A\n******\n", 0, 0),
        (TWO, {}, "A\n******\nA", 0, 0),
        (TWO, {}, "A\n******\nB\n******", 1, 1),
        (TWO, {}, "A\n******\nB\n******\nC", 0, 0),
        (CAPITALS, {}, "This Is Title Case", 0, 0),
        (END, {"end_phrase": "Any other questions?"}, 'Bye. "Any other questions?"', 1, 1),
        (END, {"end_phrase": "That is all"}, "So. That is all.", 0, 0),
        (QUOTED, {}, "\u201cText.\u201d", 0, 0),
        (JSON, {}, '```json\n{"a": 1}\n```', 1, 1),
        (JSON, {}, 'Here: ```json\n{"a": 1}\n```', 0, 0),
    ],
)
def test_EI_32_structure(
    instruction_id: str, kwargs: dict[str, Any], response: str, reference: int, repaired: int
) -> None:
    assert both(instruction_id, kwargs, response) == (bool(reference), bool(repaired))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_EI_33_none_foreign_and_zero_arguments(semantics: Any) -> None:
    unused = {"num_highlights": None, "relation": None}
    for response in ("no comma", "a, comma"):
        assert check(NO_COMMA, unused, response, semantics=semantics) is check(
            NO_COMMA, {}, response, semantics=semantics
        )
    assert check(NO_COMMA, unused, "no comma", semantics=semantics) is True
    assert breaches(NO_COMMA, {"num_highlights": 3}) == [f"{NO_COMMA} does not take 'num_highlights'"]
    never = {"letter": "q", "let_relation": "less than", "let_frequency": 0}
    assert breaches(LETTER, never) == []
    assert not any(check(LETTER, never, "aaa", semantics=semantics) for _ in range(4))


def test_EI_36_keywords() -> None:
    assert both(FREQUENCY, {"keyword": "war", "relation": "at least", "frequency": 1}, "forward") == (True, True)
    assert both(FORBIDDEN, {"forbidden_words": ["rock"]}, "ROCKET") == (True, True)
    assert both(FORBIDDEN, {"forbidden_words": ["rock"]}, "ROCK!") == (False, False)
    assert both(EXISTENCE, {"keywords": ["C++ (basic)"]}, "I know C++ (basic).") == (False, True)
    assert both(SECTIONS, {"section_spliter": "Q.(", "num_sections": 2}, "Q.( 1\na\nQ.( 2\nb") == (False, True)
    assert both(LETTER, {"letter": "t", "let_relation": "less than", "let_frequency": 2}, "Tt") == (False, False)
    assert both(FORBIDDEN, {"forbidden_words": ["C++"]}, "I know C++.") == (False, False)


@pytest.mark.parametrize(
    ("instruction_id", "kwargs", "response", "reference", "repaired"),
    [
        (PARAGRAPHS, {"num_paragraphs": 2}, "A\n****\nB", 1, 0),
        (PARAGRAPHS, {"num_paragraphs": 2}, "A *** B", 1, 1),
        (PARAGRAPHS, {"num_paragraphs": 2}, "A\n***\n***\nB", 0, 0),
        (BULLETS, {"num_bullets": 1}, "* a\n*emphasis* first\n---\n-5 degrees", 0, 1),
        (BULLETS, {"num_bullets": 2}, "* a\n  - b", 1, 1),
        (HIGHLIGHTS, {"num_highlights": 2}, "* **Head**: text", 1, 0),
        (HIGHLIGHTS, {"num_highlights": 1}, "* **Head**: text", 1, 1),
        (HIGHLIGHTS, {"num_highlights": 1}, "2 * 3 * 4", 1, 0),
        (HIGHLIGHTS, {"num_highlights": 2}, "*a b* and ***c***", 1, 1),
        (SECTIONS, {"section_spliter": "Section", "num_sections": 2}, "Section 1 Section 1", 1, 0),
        (SECTIONS, {"section_spliter": "Day", "num_sections": 1}, "Friday 5", 0, 0),
        (SECTIONS, {"section_spliter": "Day", "num_sections": 1}, "MayDay 5", 1, 0),
        (JSON, {}, '{"a": NaN}', 1, 0),
        (JSON, {}, "5", 1, 0),
        (JSON, {}, "[" * 100_000, 0, 0),
        (OPTION, {}, "My answer is yes. Because.", 1, 1),
        (OPTION, {}, "My answer is yes. My answer is no.", 1, 0),
        (PLACEHOLDERS, {"num_placeholders": 2}, "- [ ] a\n- [x] b", 1, 0),
        (PLACEHOLDERS, {"num_placeholders": 1}, "see [1] and [a link](b)", 1, 0),
        (PLACEHOLDERS, {"num_placeholders": 2}, "[name] of [the 2nd address]", 1, 1),
        (POSTSCRIPT, {"postscript_marker": "P.S."}, "the shop. S. America", 1, 0),
        (POSTSCRIPT, {"postscript_marker": "P.S."}, "Stop.s. now", 1, 0),
        (POSTSCRIPT, {"postscript_marker": "P.S."}, "Bye.\nP.S.", 1, 0),
        (POSTSCRIPT, {"postscript_marker": "P.S."}, "Bye.\n**p. s.** Call me.", 1, 1),
        (POSTSCRIPT, {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. Call me.", 1, 1),
        (POSTSCRIPT, {"postscript_marker": "P.S."}, "Bye.\nP.P.S. Call me.", 1, 0),
        (NO_COMMA, {}, "مرحبا، صباح الخير", 1, 0),
        (QUOTED, {}, '""', 1, 0),
        (LANGUAGE, {"language": "ko"}, "1234 !!", 1, 0),
        (LANGUAGE, {"language": "de"}, "ALLE SCHAUTEN HEUTE MORGEN WIEDER AUF DIE UHR AM BAHNSTEIG.", 0, 1),
        (CAPITALS, {}, "ALLE SCHAUTEN HEUTE MORGEN WIEDER AUF DIE UHR AM BAHNSTEIG.", 0, 0),
        (CAPITALS, {}, "WHO WOULD WANT TO GO HOME ON SUCH A NICE DAY?", 0, 1),
        (SENTENCES, {"num_sentences": 2, "relation": "at least"}, "Mr. Smith lives in the U.S. today.", 0, 0),
        (WORDS, {"num_words": 4, "relation": "at least"}, "I don't know", 1, 1),
    ],
)
def test_what_the_repairs_change(
    instruction_id: str, kwargs: dict[str, Any], response: str, reference: int, repaired: int
) -> None:
    assert both(instruction_id, kwargs, response) == (bool(reference), bool(repaired))


def test_language_does_not_depend_on_what_was_scored_before() -> None:
    texts = ["kort tekst", "short text ok", "no sé nada de eso", "ein kurzer text"]
    kwargs = {"language": "de"}
    first = [check(LANGUAGE, kwargs, text) for text in texts]
    random.seed(5)
    assert [check(LANGUAGE, kwargs, text) for text in reversed(texts)] == first[::-1]


def test_scoring_does_not_make_the_sentence_model_grow() -> None:
    from expert_iteration.tasks.ifeval_checks.sentences import _sentence_tokenizer

    context = _sentence_tokenizer()._params.ortho_context
    size = len(context)
    check(SENTENCES, {"num_sentences": 1, "relation": "at least"}, "See fig. Zyzzyva now. Qwertz. Asdf.")
    assert len(context) == size > 10_000


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(max_size=200), instruction_id=st.sampled_from(sorted(CHECKERS)), semantics=st.sampled_from(SEMANTICS)
)
def test_no_text_raises(text: str, instruction_id: str, semantics: Any) -> None:
    assert check(instruction_id, EXAMPLES[instruction_id].kwargs, text, semantics=semantics) in (True, False)


@settings(max_examples=100, deadline=None)
@given(
    instruction_id=st.one_of(st.sampled_from(sorted(CHECKERS)), st.text(max_size=5), st.none()),
    kwargs=st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from(sorted({name for i in CHECKERS for name in argument_names(i)})),
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.text())),
            max_size=4,
        ),
    ),
)
def test_no_arguments_raise(instruction_id: Any, kwargs: Any) -> None:
    found = breaches(instruction_id, kwargs)
    verdict = check(instruction_id, kwargs, "some text")
    assert verdict is False or found == []


HOSTILE = {
    "brackets": "[" * 20_000,
    "stars": "*" * 20_001,
    "newlines": "\n" * 20_000 + "a",
    "spaces": "a" + " " * 20_000 + "b",
    "angles": "<<" * 10_000,
    "dots": "." * 20_000,
    "initials": "a." * 10_000,
    "quotes": '"' * 20_000,
    "postscripts": "p. " * 7_000,
    "bullets": "*\n" * 10_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_quadratic_time(name: str) -> None:
    for instruction_id, example in EXAMPLES.items():
        for semantics in SEMANTICS:
            start = time.process_time()
            check(instruction_id, example.kwargs, HOSTILE[name], semantics=semantics)
            assert time.process_time() - start < 2, (instruction_id, semantics)


def test_mutated_texts_neither_raise_nor_take_long() -> None:
    """Half of them in each semantics; a longer run of the same takes other seeds."""
    rng = random.Random(0)
    for index in range(1500):
        instruction_id = rng.choice(sorted(CHECKERS))
        example = EXAMPLES[instruction_id]
        text = mutated(rng.choice((*FIXED, example.follows, example.breaks)), rng)
        start = time.process_time()
        assert check(instruction_id, example.kwargs, text, semantics=SEMANTICS[index % 2]) in (True, False)
        assert time.process_time() - start < 1, (instruction_id, text)
