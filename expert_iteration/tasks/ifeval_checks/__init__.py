"""Checkers for the 25 instruction types of IFEval (https://arxiv.org/abs/2311.07911), in two semantics.

`reference` agrees with the published checkers, faults included; `repaired` is right where they are known to be wrong.
docs/rewards.md lists the differences. Whatever cannot be checked does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, get_args

from expert_iteration.tasks.ifeval_checks import content, language, layout
from expert_iteration.tasks.ifeval_checks.content import Semantics

__all__ = ["CHECKERS", "RELATIONS", "SEMANTICS", "Semantics", "argument_names", "breaches", "check"]

SEMANTICS: tuple[Semantics, ...] = get_args(Semantics)
RELATIONS = ("less than", "at least")

CHECKERS: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": content.capital_word_frequency,
    "change_case:english_capital": language.english_capital,
    "change_case:english_lowercase": language.english_lowercase,
    "combination:repeat_prompt": layout.repeat_prompt,
    "combination:two_responses": layout.two_responses,
    "detectable_content:number_placeholders": content.number_placeholders,
    "detectable_content:postscript": content.postscript,
    "detectable_format:constrained_response": layout.constrained_response,
    "detectable_format:json_format": layout.json_format,
    "detectable_format:multiple_sections": layout.multiple_sections,
    "detectable_format:number_bullet_lists": layout.number_bullet_lists,
    "detectable_format:number_highlighted_sections": layout.number_highlighted_sections,
    "detectable_format:title": layout.title,
    "keywords:existence": content.keyword_existence,
    "keywords:forbidden_words": content.forbidden_words,
    "keywords:frequency": content.keyword_frequency,
    "keywords:letter_frequency": content.letter_frequency,
    "language:response_language": language.response_language,
    "length_constraints:nth_paragraph_first_word": layout.nth_paragraph_first_word,
    "length_constraints:number_paragraphs": layout.number_paragraphs,
    "length_constraints:number_sentences": content.number_sentences,
    "length_constraints:number_words": content.number_words,
    "punctuation:no_comma": content.no_comma,
    "startend:end_checker": layout.end_checker,
    "startend:quotation": layout.quotation,
}
"""Every instruction type and its checker, whose keyword-only parameters are the instruction's arguments."""

_ARGUMENT_NAMES = {
    instruction_id: tuple(signature(checker).parameters)[2:] for instruction_id, checker in CHECKERS.items()
}


def check(instruction_id: str, kwargs: Mapping[str, Any], response: str, *, semantics: Semantics = "repaired") -> bool:
    """Whether a response follows an instruction. False for a blank response, and for an unknown instruction or unusable
    arguments, which `breaches` explains. An argument that is None counts as not given.

    Raises ValueError for unknown semantics, and for nothing else.
    """
    if semantics not in SEMANTICS:
        raise ValueError(f"semantics={semantics!r} has to be one of {', '.join(SEMANTICS)}")
    if not response.strip() or breaches(instruction_id, kwargs):
        return False
    return CHECKERS[instruction_id](response, semantics, **_given(kwargs))


def argument_names(instruction_id: str) -> tuple[str, ...]:
    """The arguments that an instruction needs, all of them."""
    return _ARGUMENT_NAMES[instruction_id]


def breaches(instruction_id: Any, kwargs: Any) -> list[str]:
    """What is wrong with an instruction and its arguments, as sentences without a full stop; empty when nothing is."""
    if not isinstance(instruction_id, str) or instruction_id not in CHECKERS:
        return [f"{instruction_id!r} is no instruction of IFEval"]
    if not isinstance(kwargs, Mapping):
        return [f"the arguments of {instruction_id} have to be an object, not {kwargs!r}"]
    given, names = _given(kwargs), _ARGUMENT_NAMES[instruction_id]
    found = [f"{instruction_id} does not take {name!r}" for name in given if name not in names]
    found += [f"{instruction_id} needs {name!r}" for name in names if name not in given]
    if found:
        return found
    for name, value in given.items():
        constraint = _broken_constraint(name, value)
        if constraint is not None:
            found.append(f"{instruction_id}: {name}={value!r} has to be {constraint}")
    if not found and "nth_paragraph" in given and given["nth_paragraph"] > given["num_paragraphs"]:
        found.append(f"{instruction_id}: nth_paragraph={given['nth_paragraph']} is beyond num_paragraphs")
    return found


def _given(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}


def _broken_constraint(name: str, value: Any) -> str | None:
    """What the value of an argument has to be and is not; None when it is."""
    if name in ("relation", "let_relation", "capital_relation"):
        valid, constraint = value in RELATIONS, " or ".join(map(repr, RELATIONS))
    elif name in ("keywords", "forbidden_words"):
        valid = isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))
        constraint = "a list of texts, none of them blank"
    elif name == "letter":
        valid, constraint = _is_text(value) and len(value) == 1, "one character"
    elif name == "language":
        valid = isinstance(value, str) and value in language.LANGUAGES
        constraint = "a language code that langdetect knows"
    elif name == "nth_paragraph":
        valid, constraint = _is_count(value) and value >= 1, "a whole number from 1"
    elif name.startswith("num_") or name.endswith("frequency"):
        valid, constraint = _is_count(value), "a whole number from 0"
    else:
        valid, constraint = _is_text(value), "a text that is not blank"
    return None if valid else constraint


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
