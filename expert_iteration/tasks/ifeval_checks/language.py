"""Checkers that recognise the language of a response, with langdetect.

See content.py for what checkers take and give, and for the two semantics.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from expert_iteration.tasks.ifeval_checks.content import Semantics

if TYPE_CHECKING:
    from langdetect.detector_factory import DetectorFactory

SEED = 0
_CODES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
LANGUAGES = frozenset(_CODES.split())
"""Codes that langdetect tells apart."""


def response_language(response: str, semantics: Semantics, *, language: str) -> bool:
    """The response is in the language."""
    if semantics == "reference":
        return detect_language(response) in (language, None)
    return detect_language(response.lower() if response.isupper() else response) == language


def english_capital(response: str, semantics: Semantics) -> bool:
    """English, and every letter is a capital."""
    if semantics == "reference":
        return response.isupper() and detect_language(response) in ("en", None)
    return response.isupper() and detect_language(response.lower()) == "en"


def english_lowercase(response: str, semantics: Semantics) -> bool:
    """English, and no letter is a capital."""
    accepted = ("en", None) if semantics == "reference" else ("en",)
    return response.islower() and detect_language(response) in accepted


def detect_language(text: str) -> str | None:
    """Code of the likeliest language; None when there is nothing to tell it by.

    langdetect draws at random, here from the same seed for every text. It passes over words in capitals.
    """
    from langdetect.lang_detect_exception import LangDetectException

    detector = _detector_factory().create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


@cache
def _detector_factory() -> DetectorFactory:
    """A factory of our own, so that no other user of langdetect changes the seed. Profiles go by name, not as the file
    system lists them."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.set_seed(SEED)
    factory.load_json_profile([path.read_text(encoding="utf-8") for path in sorted(Path(PROFILES_DIRECTORY).iterdir())])
    return factory
