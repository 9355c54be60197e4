"""One response that follows and one that does not, for each instruction type: they tell whether a checker and its
language and sentence models work at all."""

from __future__ import annotations

from typing import Any, NamedTuple

_ENGLISH = "the morning train was late again and everybody on the platform looked at the clock"
_GERMAN = "Der Zug hatte heute Morgen wieder Verspätung und alle schauten auf die Uhr am Bahnsteig."


class Example(NamedTuple):
    """An instruction's arguments and two responses to it."""

    kwargs: dict[str, Any]
    follows: str
    breaks: str


EXAMPLES = {
    "change_case:capital_word_frequency": Example(
        {"capital_frequency": 2, "capital_relation": "at least"}, "STOP the TRAIN.", "STOP the train."
    ),
    "change_case:english_capital": Example({}, _ENGLISH.upper(), _ENGLISH),
    "change_case:english_lowercase": Example({}, _ENGLISH, _ENGLISH.capitalize()),
    "combination:repeat_prompt": Example({"prompt_to_repeat": "Name a colour."}, "Name a colour. Red.", "Red."),
    "combination:two_responses": Example({}, "Red.\n******\nBlue.", "Red.\n******\nRed."),
    "detectable_content:number_placeholders": Example(
        {"num_placeholders": 2}, "Dear [name], see you at [place].", "Dear [name], see you."
    ),
    "detectable_content:postscript": Example({"postscript_marker": "P.S."}, "Bye.\nP.S. Call me.", "Bye. Call me."),
    "detectable_format:constrained_response": Example({}, "My answer is yes.", "Yes."),
    "detectable_format:json_format": Example({}, '```json\n{"colour": "red"}\n```', 'Here: {"colour": "red"}'),
    "detectable_format:multiple_sections": Example(
        {"section_spliter": "Section", "num_sections": 2}, "Section 1\nRed.\nSection 2\nBlue.", "Section 1\nRed."
    ),
    "detectable_format:number_bullet_lists": Example({"num_bullets": 2}, "* red\n* blue", "* red\n* blue\n* green"),
    "detectable_format:number_highlighted_sections": Example(
        {"num_highlights": 2}, "*Red* is warm, **blue** is cold.", "*Red* is warm, blue is cold."
    ),
    "detectable_format:title": Example({}, "<<Colours>>\nRed.", "<Colours>\nRed."),
    "keywords:existence": Example({"keywords": ["red", "blue"]}, "Red and blue.", "Red."),
    "keywords:forbidden_words": Example({"forbidden_words": ["red"]}, "Blue.", "Red."),
    "keywords:frequency": Example({"keyword": "red", "frequency": 2, "relation": "at least"}, "Red, red.", "Red."),
    "keywords:letter_frequency": Example(
        {"letter": "r", "let_frequency": 2, "let_relation": "less than"}, "Red.", "Red roses."
    ),
    "language:response_language": Example({"language": "de"}, _GERMAN, _ENGLISH),
    "length_constraints:nth_paragraph_first_word": Example(
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "blue"}, "Red.\n\nBlue.", "Blue.\n\nRed."
    ),
    "length_constraints:number_paragraphs": Example({"num_paragraphs": 2}, "Red.\n***\nBlue.", "Red.\n\nBlue."),
    "length_constraints:number_sentences": Example(
        {"num_sentences": 2, "relation": "at least"}, "Dr. Red is here. He waits.", "Dr. Red is here."
    ),
    "length_constraints:number_words": Example(
        {"num_words": 3, "relation": "less than"}, "Two words.", "Just 3 words."
    ),
    "punctuation:no_comma": Example({}, "Red and blue.", "Red, blue."),
    "startend:end_checker": Example({"end_phrase": "Any other questions?"}, "Red. Any other questions?", "Red."),
    "startend:quotation": Example({}, '"Red."', "Red."),
}
"""By instruction type, all of them."""
