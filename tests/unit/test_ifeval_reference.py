"""`reference` agrees with the checkers that torchrl ships, on every published prompt. Every disagreement is explained.

The fast form gives each prompt a few responses; `pytest -m slow tests/unit/test_ifeval_reference.py` gives each 60.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from expert_iteration.tasks.ifeval import Instruction, follow
from expert_iteration.tasks.ifeval_checks import CHECKERS, check
from expert_iteration.tasks.ifeval_checks.examples import EXAMPLES
from tests.ifeval_responses import FIXED, responses

DATA = Path(os.environ.get("EI_DATA_DIR", Path(__file__).parents[2].parent / "shared" / "data")) / "ifeval"
PACKAGES = ("nltk", "langdetect", "immutabledict", "punkt")

pytestmark = [
    pytest.mark.skipif(not (DATA / "input_data.jsonl").is_file(), reason=f"no IFEval at {DATA}; set EI_DATA_DIR"),
    pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason=f"not installed: some of {', '.join(PACKAGES)}"),
]

Reference = Callable[[list[str], list[dict[str, Any]], str], tuple[list[bool], list[bool]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """torchrl's strict and loose scoring, with the sentence model where NLTK looks for it and langdetect seeded."""
    import langdetect
    import nltk
    from nltk.tokenize.punkt import PunktParameters, save_punkt_params
    from punkt.data import load_bundled
    from torchrl.envs.llm.reward.ifeval import _instructions_main as published

    folder = tmp_path_factory.mktemp("nltk_data")
    model, parameters = load_bundled("english"), PunktParameters()
    parameters.abbrev_types = model.abbrev_types
    parameters.collocations = model.collocations
    parameters.sent_starters = model.sent_starters
    parameters.ortho_context.update(model.ortho_context)
    (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)
    save_punkt_params(parameters, dir=str(folder / "tokenizers" / "punkt_tab" / "english"))

    def score(ids: list[str], kwargs: list[dict[str, Any]], response: str) -> tuple[list[bool], list[bool]]:
        example = published._InputExample(key=0, instruction_id_list=ids, prompt="", kwargs=kwargs)
        strict = published._test_instruction_following_strict(example, response).follow_instruction_list
        return strict, published._test_instruction_following_loose(example, response).follow_instruction_list

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(langdetect.DetectorFactory, "seed", 0)
        patch.setattr(nltk.data, "path", [str(folder)])
        yield score


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "input_data.jsonl").read_text(encoding="utf-8").splitlines()]


def is_explained(instruction_id: str, kwargs: Mapping[str, Any]) -> bool:
    """The one disagreement on the published prompts: torchrl takes a random letter for any that is not of a to z."""
    return instruction_id == "keywords:letter_frequency" and not "a" <= kwargs["letter"].lower() <= "z"


def disagreements(rows: list[dict[str, Any]], reference: Reference, per_prompt: int) -> tuple[list[Any], int, int]:
    """What differs without an explanation, the number of verdicts, and how many of these were positive."""
    found, verdicts, positive = [], 0, 0
    for row in rows:
        ids, kwargs = row["instruction_id_list"], row["kwargs"]
        compared = [index for index in range(len(ids)) if not is_explained(ids[index], kwargs[index])]
        instructions = list(map(Instruction, ids, kwargs))
        for response in responses(ids, kwargs, random.Random(row["key"]), per_prompt):
            expected, ours = reference(ids, kwargs, response), follow(instructions, response, "reference")
            for index in compared:
                for mode, theirs, own in zip(("strict", "loose"), expected, ours, strict=True):
                    verdicts += 1
                    positive += theirs[index]
                    if theirs[index] != own[index]:
                        found.append((row["key"], ids[index], kwargs[index], mode, theirs[index], own[index], response))
    return found, verdicts, positive


def test_reference_agrees_on_every_published_prompt(rows: list[dict[str, Any]], reference: Reference) -> None:
    found, verdicts, positive = disagreements(rows, reference, per_prompt=3)
    assert found == []
    assert verdicts > 4000 and 0.3 < positive / verdicts < 0.8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_reference_agrees_at_length(rows: list[dict[str, Any]], reference: Reference) -> None:
    found, verdicts, positive = disagreements(rows, reference, per_prompt=60)
    assert found == []
    assert verdicts > 80_000 and 0.3 < positive / verdicts < 0.8


@pytest.mark.parametrize("instruction_id", CHECKERS)
def test_reference_agrees_on_every_fixed_text(instruction_id: str, reference: Reference) -> None:
    example = EXAMPLES[instruction_id]
    for response in (example.follows, example.breaks, *FIXED):
        theirs = reference([instruction_id], [example.kwargs], response)[0][0]
        assert check(instruction_id, example.kwargs, response, semantics="reference") is theirs, response
    assert check(instruction_id, example.kwargs, example.follows, semantics="reference") is True
    assert check(instruction_id, example.kwargs, example.breaks, semantics="reference") is False


def test_the_letters_that_torchrl_replaces(rows: list[dict[str, Any]]) -> None:
    explained = [
        kwargs["letter"]
        for row in rows
        for name, kwargs in zip(row["instruction_id_list"], row["kwargs"], strict=True)
        if is_explained(name, kwargs)
    ]
    assert sorted(explained) == ["!", "#"]


@pytest.mark.parametrize(
    ("instruction_id", "kwargs", "response"),
    [
        ("keywords:existence", {"keywords": ["C++ (basic"]}, "C++ (basic"),
        ("keywords:forbidden_words", {"forbidden_words": ["a("]}, "b"),
        ("keywords:frequency", {"keyword": "*", "frequency": 1, "relation": "less than"}, "b"),
        ("detectable_format:multiple_sections", {"section_spliter": "Q.(", "num_sections": 1}, "Q.( 1"),
        ("detectable_format:json_format", {}, "[" * 100_000),
        ("punctuation:no_comma", {"num_highlights": 3}, "no commas"),
        ("keywords:unknown", {}, "text"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "roughly"}, "a b"),
    ],
)
def test_where_torchrl_raises_nothing_passes(
    instruction_id: str, kwargs: dict[str, Any], response: str, reference: Reference
) -> None:
    with pytest.raises(Exception):  # noqa: B017 (re.error, RecursionError, TypeError, KeyError, ValueError)
        reference([instruction_id], [kwargs], response)
    assert check(instruction_id, kwargs, response, semantics="reference") is False
