"""Responses that no model should write and some will: real ones cut, doubled and littered, and texts of one thing."""

from __future__ import annotations

import random
from collections.abc import Sequence

LITTER = (
    *("\\boxed{", "\\boxed{}", "\\boxed{{{", "}}}", "\\frac{"),
    *("\\frac{1}{0}", "\\frac12", "\\left(", "\\right", "$", "$$"),
    *("<answer>", "</answer>", "<answer></answer>", "<think>", "</think>", "####", "#### ", "#### 1", "#" * 50),
    *("[", "]", "(", ")", "{", "}", "[" * 200, "(" * 200, "{" * 200, "[[1, 2], [3]]", '{"a": [', "```json", "```"),
    *("nan", "inf", "-inf", "1e999999999", "-1e-999999999", "1/0", "0x10", "1_000", ".5", "5.", "1,000,00", "9" * 500),
    *("1" + ",000" * 100, "3." + "3" * 400, "9**9**9", "9^{9^{9}}"),
    *("x**99999", "10000!", "3!!!", "\\sum_{i=1}^{99999} i"),
    *("\x00", "\x07", "\x1b[31m", "\r", "\r\n", "\x0b"),
    *("\x85", "\u2028", "\u2029", "\ufeff", "\u200b", "\u200f", "\u202e"),
    *("\ud800", "\udfff", "\ud83d", "\U0001f642", "e\u0301"),
    *("\u0660\u0661\u0662", "\uff11\uff12", "\u00bd", "\u2212", "\u00d7"),
    *("שלום ", "مرحبا ", "你好，", "İ", "ß", "ﬁ", "Σς", "𝟙𝟚", "௧"),
    *("\n" * 300, " " * 300, "\t" * 50, "*" * 50, "***", "******", "\n\n"),
    *("* ", "- ", "<<", ">>", '"', "'", ". " * 50, "! "),
    *("P.S.", "P. P. S", "Dr. ", "U.S. ", "I ", "A-"),
    *("https://example.org/" + "a/" * 50, "&lt;", "%s", "{0}", "\\", "\\\\"),
)  # fmt: skip
"""What gets into a text."""
REPEATED = (
    *("a", "A", "A ", "A. ", "a. ", "Ab ", "é", "9", "9,", "123,", "0.", "1/", "1 ", "-", "$", "#", "#### 1\n", "####"),
    *("[", "[[", "(", "{", "{}", "\\boxed{", "\\boxed{1}", "\\frac{1}{", "<answer>", "<answer>1</answer>", "</think>"),
    *("\n", "\n\n", " ", "\t", "*", "**a** ", "* a\n", "- a\n", "<<a>>"),
    *('"', ". ", "! ", "? ", "'", ",", "你好", "\u202e", "\ud800"),
)  # fmt: skip
"""What a text may be made of from beginning to end."""
LONG = 1_000_000
"""Characters of the longest texts."""


def fuzzed(rng: random.Random, real: Sequence[str], count: int) -> list[str]:
    """`count` responses: one of every 300 is a million times the same character or so, some repeat one thing up to 5000
    characters, and the others are real ones after up to ten changes."""
    texts = []
    for number in range(count):
        if number % 300 == 150:
            texts.append(repeated(rng, LONG))
        elif number % 10 == 0:
            texts.append(repeated(rng, rng.randrange(1, 5000)) + rng.choice(LITTER))
        else:
            texts.append(mutated(rng, real))
    return texts


def repeated(rng: random.Random, length: int) -> str:
    """One thing over and over."""
    unit = rng.choice(REPEATED)
    return (unit * (length // len(unit) + 1))[:length]


def mutated(rng: random.Random, real: Sequence[str]) -> str:
    """A real response after a few changes."""
    text = rng.choice(real)
    for _ in range(rng.randrange(11)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.randrange(60))
        match rng.randrange(8):
            case 0:
                text = text[:start]
            case 1:
                text = text[start:]
            case 2:
                text = text[:start] + text[end:]
            case 3:
                text = (text + rng.choice(("", "\n", " ")) + text)[:20_000]
            case 4:
                text = text[:start] + text[start:end][::-1] + text[end:]
            case 5:
                text = text[:start] + text[start:end].swapcase() + rng.choice(real)[:100] + text[end:]
            case _:
                text = text[:start] + rng.choice(LITTER) * rng.choice((1, 1, 1, 2, 20)) + text[start:]
    return text
