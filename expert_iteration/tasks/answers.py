"""Finding the final answer in a response, and comparing numbers exactly.

Rules, in order:

1. Reasoning is dropped: everything up to the last `</think>`, and everything from a `<think>` that is never closed.
2. The last complete marked answer wins, whichever of these it is: `#### 72`, `\\boxed{72}`, `<answer>72</answer>`.
3. Without a marked answer the last number of the text is the answer.

Numbers are written as in English: `9,500`, `.5`, `1/2`, `1.8e1`, with currency, LaTeX or markdown around them; `70.000`
is 70. A marked answer that names several numbers ("5 or 7") is a hedge and matches nothing.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 1000
MAX_EXPONENT = 10_000
CURRENCY_SIGNS = "$€£¥"

_NUMBER = re.compile(
    r"""
    (?<![A-Za-z_0-9])(?<![0-9]\.)                     # not inside a word or another number
    (?:(?<![)\]}])[-+])?                              # 7-5 and (2)-5 end in 5, not in -5
    (?:
        (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?
        |(?<!\.)\.[0-9]+
    )
    (?:[eE][-+]?[0-9]+|/[0-9]+)?
    """,
    re.VERBOSE,
)
_SIGN = r"(?:(?<![A-Za-z_0-9)\]}])([-+]))?"
_CURRENCY = re.compile(_SIGN + rf"\\?[{CURRENCY_SIGNS}]")
_FRAC = re.compile(_SIGN + r"\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_SPACE_IN_NUMBER = re.compile(r"(?<=[0-9])\\[,!](?=[0-9]{3})")
_HASHES = re.compile(r"(?<!#)####(?!#)((?:(?!####)[^\n])*)")
_BRACE = re.compile(r"\\boxed\s*\{|\\?[{}]")


def strip_reasoning(text: str) -> str:
    """The text without its reasoning: what follows the last `</think>`, up to a `<think>` that is never closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def extract_answer(text: str) -> str | None:
    """The final answer by the rules above: a number as written, less separators and currency; the content of a marked
    answer that is not one number; None where there is no marked answer and no number."""
    text = strip_reasoning(text)
    marked = last_marked_answer(text)
    if marked is None:
        numbers = find_numbers(text)
        return numbers[-1] if numbers else None
    content = last_marked_answer(marked) or marked
    numbers = find_numbers(content)
    return numbers[0] if len(numbers) == 1 else content


def answers_match(answer: str, gold: str) -> bool:
    """Whether each names exactly one number and the two are equal, compared as fractions and never as floats."""
    value = parse_number(answer)
    return value is not None and value == parse_number(gold)


def closeness(answer: str | None, gold: str) -> float:
    """max(0, 1 - |a - g| / max(|g|, 10)) for the one number a of the answer and the one number g of the gold, else 0.

    An error as large as the gold itself, or as ten where the gold is smaller than ten, is worth nothing.
    """
    value = parse_number(answer or "")
    gold_value = parse_number(gold)
    if value is None or gold_value is None:
        return 0.0
    if value == gold_value:
        return 1.0
    return float(max(Fraction(0), 1 - abs(value - gold_value) / max(abs(gold_value), Fraction(10))))


def parse_number(text: str) -> Fraction | None:
    """The value of the one number in a text; None without one, with several, or with one too long to compute with."""
    numbers = find_numbers(text)
    if len(numbers) != 1 or len(numbers[0]) > MAX_NUMBER_CHARS:
        return None
    significand, _, exponent = numbers[0].lower().partition("e")
    dividend, _, divisor = significand.partition("/")
    if abs(int(exponent or 0)) > MAX_EXPONENT or int(divisor or 1) == 0:
        return None
    whole, _, decimals = dividend.partition(".")
    power = int(exponent or 0) - len(decimals)
    # One fraction of two whole numbers: arithmetic with fractions takes most of the time of scoring.
    return Fraction(int(whole + decimals) * 10 ** max(power, 0), int(divisor or 1) * 10 ** max(-power, 0))


def find_numbers(text: str) -> list[str]:
    """Every number of a text in order, as written, less thousands separators, plus signs and currency."""
    return [match.group().replace(",", "").removeprefix("+") for match in _NUMBER.finditer(_without_markup(text))]


def last_marked_answer(text: str) -> str | None:
    """Stripped content of the marked answer that ends last and is not empty; None without one."""
    marked = [found for found in (_last_hashes(text), _last_boxed(text), _last_tagged(text)) if found is not None]
    return max(marked)[1] if marked else None


def last_tagged_answer(text: str) -> str | None:
    """Stripped content of the last complete `<answer>...</answer>` that is not empty; None without one."""
    tagged = _last_tagged(text)
    return tagged[1] if tagged else None


def last_boxed_answer(text: str) -> str | None:
    """Stripped content of the last `\\boxed{...}` whose braces match and that is not empty; None without one."""
    boxed = _last_boxed(text)
    return boxed[1] if boxed else None


def _without_markup(text: str) -> str:
    """The text as `_NUMBER` expects it: LaTeX fractions written a/b, no LaTeX spacing in numbers, no currency."""
    text = text.replace("\u2212", "-").replace("{,}", ",")
    if "\\" in text:
        text = _SPACE_IN_NUMBER.sub("", text)
        text = _FRAC.sub(r" \1\2/\3", text)
    return _CURRENCY.sub(r" \1", text) if any(sign in text for sign in CURRENCY_SIGNS) else text


def _last_hashes(text: str) -> tuple[int, str] | None:
    """End and content of the last `#### 72`. A markdown heading of that level (`#### Step 1`) has letters first."""
    found = None
    for match in _HASHES.finditer(text):
        content = match.group(1).strip()
        number = _NUMBER.search(_without_markup(content))
        if number and not re.search(r"[A-Za-z]", _without_markup(content)[: number.start()]):
            found = (match.end(), content)
    return found


def _last_boxed(text: str) -> tuple[int, str] | None:
    """End and content of the last `\\boxed{...}` whose braces match, in one pass."""
    if "\\boxed" not in text:
        return None
    found = None
    opened: list[tuple[bool, int]] = []
    for match in _BRACE.finditer(text):
        brace = match.group()
        if brace in ("\\{", "\\}"):
            continue
        if brace != "}":
            opened.append((brace != "{", match.end()))
        elif opened:
            is_boxed, start = opened.pop()
            content = text[start : match.start()].strip() if is_boxed else ""
            found = (match.end(), content) if content else found
    return found


def _last_tagged(text: str) -> tuple[int, str] | None:
    """End and content of the last `<answer>...</answer>`; an answer that is not closed is not complete."""
    end = len(text)
    while (close := text.rfind("</answer>", 0, end)) >= 0 and (start := text.rfind("<answer>", 0, close)) >= 0:
        content = text[start + len("<answer>") : close].strip()
        if content:
            return close + len("</answer>"), content
        end = start
    return None
