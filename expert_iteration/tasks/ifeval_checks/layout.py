"""Checkers of how a response is laid out: paragraphs, lists, sections, a title, JSON, its beginning and its end.

See content.py for what checkers take and give, and for the two semantics.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from expert_iteration.tasks.ifeval_checks.content import Semantics

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCES = ("```json", "```Json", "```JSON", "```")


def number_paragraphs(response: str, semantics: Semantics, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs between dividers `***`; one between two dividers must not be blank."""
    divider = r"\s?\*\*\*\s?" if semantics == "reference" else r"(?<!\S)\*\*\*(?!\S)"
    blank = [not paragraph.strip() for paragraph in re.split(divider, response)]
    return not any(blank[1:-1]) and blank.count(False) == num_paragraphs


def nth_paragraph_first_word(
    response: str, semantics: Semantics, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Exactly so many paragraphs between empty lines, and the nth starts with the word, in any letter case."""
    parts = [part.strip() for part in response.split("\n\n")]
    paragraphs = [part for part in parts if part]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    paragraph = (parts if semantics == "reference" else paragraphs)[nth_paragraph - 1]
    word = (paragraph.split() or [""])[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def number_bullet_lists(response: str, semantics: Semantics, *, num_bullets: int) -> bool:
    """Exactly so many bullet points, marked by `*` or `-`."""
    if semantics == "reference":
        starred = re.findall(r"^[^\S\n]*\*[^*].*$", response, re.MULTILINE)
        dashed = re.findall(r"^[^\S\n]*-.*$", response, re.MULTILINE)
        return len(starred) + len(dashed) == num_bullets
    return sum(map(_is_bullet, response.split("\n"))) == num_bullets


def number_highlighted_sections(response: str, semantics: Semantics, *, num_highlights: int) -> bool:
    """At least so many texts within a line between asterisks, as *italic* or **bold**."""
    if semantics == "reference":
        single = [text for text in re.findall(r"\*([^\n*]*)\*", response) if text.strip()]
        double = [text for text in re.findall(r"\*\*([^\n*]*)\*\*", response) if text.strip()]
        return len(single) + len(double) >= num_highlights
    spans = re.findall(r"(?<!\*)(\*{1,3})(?![\s*])[^\n*]+(?<!\s)\1(?!\*)", response)
    return len(spans) >= num_highlights


def multiple_sections(response: str, semantics: Semantics, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each opened by the splitter and a number."""
    splitter = section_spliter.strip()
    if semantics == "reference":
        try:
            return len(re.split(rf"\s?{splitter}\s?\d+\s?", response)) - 1 >= num_sections
        except re.error:
            return False
    numbers = re.findall(rf"(?<!\w){re.escape(splitter)}\s?(\d+)", response)
    return len(set(numbers)) >= num_sections


def title(response: str, semantics: Semantics) -> bool:
    """A title within a line between double angular brackets, such as <<poem of joy>>."""
    return any(map(_has_title, response.split("\n")))


def json_format(response: str, semantics: Semantics) -> bool:
    """The whole response is JSON, in a code fence or not."""
    text = response.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    text = text.removesuffix("```").strip()
    try:
        value = json.loads(text, parse_constant=None if semantics == "reference" else _refuse_constant)
    except (ValueError, RecursionError):
        return False
    return semantics == "reference" or isinstance(value, dict | list)


def constrained_response(response: str, semantics: Semantics) -> bool:
    """One of the three answers stands in the response."""
    count = sum(option in response for option in OPTIONS)
    return count >= 1 if semantics == "reference" else count == 1


def two_responses(response: str, semantics: Semantics) -> bool:
    """Two different texts with `******` between them."""
    parts = [part.strip() for part in response.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(response: str, semantics: Semantics, *, prompt_to_repeat: str) -> bool:
    """The response starts with the request, in any letter case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, semantics: Semantics, *, end_phrase: str) -> bool:
    """The response ends with the phrase, in any letter case; only double quotes may follow."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(response: str, semantics: Semantics) -> bool:
    """The whole response stands in straight double quotes."""
    text = response.strip()
    quoted = len(text) > 1 and text[0] == '"' and text[-1] == '"'
    return quoted and (semantics == "reference" or bool(text[1:-1].strip()))


def _is_bullet(line: str) -> bool:
    """Whether a line is `* text` or `- text`: no emphasis at its beginning, no rule such as `---` or `* * *`."""
    text = line.strip()
    return text[:1] in ("*", "-") and text[1:2].isspace() and bool(text.strip("*-_ \t"))


def _has_title(line: str) -> bool:
    """Whether something stands between the first `<<` and the last `>>`. The pattern for it takes quadratic time."""
    start, end = line.find("<<"), line.rfind(">>")
    return 0 <= start < end and bool(line[start : end + 2].lstrip("<").rstrip(">").strip())


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
