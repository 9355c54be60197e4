"""Checkers of what a response says: keywords, letters, lengths, placeholders, a postscript, punctuation.

Each checker takes a response that is not blank and says whether it follows the instruction. `reference` is what the
published checkers do; docs/rewards.md lists where `repaired` differs and why. All take time linear in the response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from expert_iteration.tasks.ifeval_checks.sentences import count_capital_words, split_sentences

Semantics = Literal["reference", "repaired"]

COMMAS = ",，،、"
"""The comma of Latin scripts, and those of Chinese and Japanese and of Arabic scripts."""


def holds(count: int, relation: str, threshold: int) -> bool:
    """Whether a count is "less than" or "at least" a threshold."""
    return count < threshold if relation == "less than" else count >= threshold


def keyword_existence(response: str, semantics: Semantics, *, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, as part of a word too, in any letter case."""
    return all(_count(keyword, response, semantics) for keyword in keywords)


def keyword_frequency(response: str, semantics: Semantics, *, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs so often, as part of a word too, in any letter case."""
    count = _count(keyword.strip(), response, semantics)
    return count is not None and holds(count, relation, frequency)


def forbidden_words(response: str, semantics: Semantics, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs as a whole word, in any letter case."""
    if semantics == "reference":
        patterns = [_compile(rf"\b{word}\b") for word in forbidden_words]
    else:
        patterns = [_compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)") for word in forbidden_words]
    return all(pattern is not None and pattern.search(response) is None for pattern in patterns)


def letter_frequency(
    response: str, semantics: Semantics, *, letter: str, let_frequency: int, let_relation: str
) -> bool:
    """The character occurs so often, in either letter case."""
    return holds(response.lower().count(letter.lower()), let_relation, let_frequency)


def number_sentences(response: str, semantics: Semantics, *, num_sentences: int, relation: str) -> bool:
    """So many sentences, as the Punkt model for English splits them."""
    return holds(len(split_sentences(response)), relation, num_sentences)


def number_words(response: str, semantics: Semantics, *, num_words: int, relation: str) -> bool:
    """So many words: runs of letters, digits and underscores, so "don't" is two."""
    return holds(len(re.findall(r"\w+", response)), relation, num_words)


def capital_word_frequency(
    response: str, semantics: Semantics, *, capital_frequency: int, capital_relation: str
) -> bool:
    """So many words whose letters are all capitals; "I" is one, and so is a word with hyphens."""
    return holds(count_capital_words(response), capital_relation, capital_frequency)


def number_placeholders(response: str, semantics: Semantics, *, num_placeholders: int) -> bool:
    """At least so many placeholders such as [address]."""
    if semantics == "reference":
        return sum(_count_brackets(line) for line in response.split("\n")) >= num_placeholders
    contents = re.findall(r"\[([^\[\]\n]*)\](?!\()", response)
    named = [text for text in contents if text.strip().lower() != "x" and any(map(str.isalpha, text))]
    return len(named) >= num_placeholders


def postscript(response: str, semantics: Semantics, *, postscript_marker: str) -> bool:
    """A postscript that starts with the marker, in any letter case."""
    marker, text = postscript_marker.strip(), response.lower()
    if semantics == "reference":
        published = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
        pattern = _compile(published.get(marker, marker.lower()))
        return pattern is not None and pattern.search(text) is not None
    spaced = {"P.P.S": r"p\.\s?p\.\s?s\b", "P.S.": r"p\.\s?s\."}.get(marker, re.escape(marker.lower()))
    found = re.search(rf"(?<![\w.]){spaced}", text)
    return found is not None and any(map(str.isalnum, text[found.end() :]))


def no_comma(response: str, semantics: Semantics) -> bool:
    """No comma at all."""
    return not any(comma in response for comma in ("," if semantics == "reference" else COMMAS))


def _count(keyword: str, response: str, semantics: Semantics) -> int | None:
    """How often a keyword occurs, in any letter case; None for a keyword that the reference cannot read."""
    if semantics == "repaired":
        return response.lower().count(keyword.lower())
    pattern = _compile(keyword)
    return None if pattern is None else len(pattern.findall(response))


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str] | None:
    """The pattern in any letter case; None when it is no pattern. The reference takes the data's texts for patterns."""
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error:
        return None


def _count_brackets(line: str) -> int:
    """Pairs of an opening bracket and the next closing one. The pattern for them takes quadratic time without a closing
    bracket."""
    count, end = 0, -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start + 1)) >= 0:
        count += 1
    return count
