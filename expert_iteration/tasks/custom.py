"""The user's own task: rows with a `prompt` and anything else, and the user's own reward functions.

`reward(response: str, row: dict) -> float | dict[str, float] | None`; docs/rewards.md says the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.answers import strip_reasoning
from expert_iteration.tasks.base import SPLITS, check_prompt_template, render_prompt, with_default_options
from expert_iteration.tasks.reward_function import KEY, RewardFunction, Verdict, load_function
from expert_iteration.tasks.row_files import DataSource, ParsedRow, RowError, load_rows
from expert_iteration.tasks.row_task import RowTask
from expert_iteration.tasks.self_check import Failure, check_answers
from expert_iteration.tasks.verifier_pool import InProcessVerifier
from expert_iteration.types import Prompt, Score, ScoreMany, Split

RESERVED = ("success", "task_reward", "reward_model")
"""Details that have a meaning of their own."""
ROLES = ("system", "user", "assistant")
CHECKED_ROWS = 20
"""Rows that the self-check tries with responses that must be no success: so many for each of the two splits."""
_WAY_OUT = "repair or remove the row"
_CHECK_WAY_OUT = (
    "repair the row or the function, set env.options.success_at to the reward that a success has, or write "
    "env.invalid_rows=drop"
)


class Custom(RowTask):
    """Rows from files or the hub, scored by the functions that env.options.reward names."""

    name = "custom"

    def __init__(
        self,
        *,
        options: Mapping[str, Any],
        data_path: str | None = None,
        prompt_template: str | None = None,
        reward: str = "graded",
        train_size: int | None = None,
        test_size: int | None = None,
        drop_invalid: bool = False,
    ) -> None:
        """Imports the functions and reads all rows. Raises UserError for whatever the user has to change."""
        self._options = with_default_options(self.name, options)
        _check_options(self._options, data_path)
        self._functions = _functions(self._options)
        self._graded = reward == "graded"
        self._template = prompt_template
        if prompt_template is not None:
            check_prompt_template(prompt_template)
        path = None if data_path is None else Path(data_path)
        hub = (self._options["dataset"], self._options["dataset_config"])
        source = DataSource(path, *hub, "env.options.dataset", _WAY_OUT)
        sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        super().__init__(
            load_rows(source, self._parse_row, sizes, drop_invalid=drop_invalid), drop_invalid=drop_invalid
        )

    @property
    def is_async(self) -> bool:
        """Whether one of the functions is."""
        return any(function.is_async for function in self._functions)

    @property
    def concurrency(self) -> int:
        """Responses that async functions may work on at a time."""
        return int(self._options["concurrency"])

    def score(self, prompt: Prompt, response_text: str) -> Score:
        """The weighted sum of the functions' rewards (graded), or 1 where the response is a success and 0 (exact).

        None where any function returned None or what is no reward, or raised; `details` says which of these.
        """
        text = self._scored_text(response_text)
        return self._combined([function.call(text, prompt.gold) for function in self._functions])

    async def score_async(self, prompt: Prompt, response_text: str) -> Score:
        """The same, with all functions at once."""
        text = self._scored_text(response_text)
        return self._combined(await asyncio.gather(*(f.call_async(text, prompt.gold) for f in self._functions)))

    def self_check(self, score_many: ScoreMany | None = None) -> None:
        """Calls the functions for the first rows of each split with an empty response and, where env.options.gold names
        a column, with wrong ones; and then with the gold response of every row.

        Raises UserError, or drops rows, where a function raises or returns what is no reward, where a gold response is
        no success, or where an empty one or several wrong ones are.
        """
        column = self._options["gold"]
        score = score_many or InProcessVerifier(self.score).score_many
        broken: dict[int, Failure] = {}

        def scored(items: Sequence[tuple[Prompt, str]]) -> list[Score]:
            scores = score(items)
            for (prompt, response), given in zip(items, scores, strict=True):
                for name in given.details:
                    if name.endswith((".raised", ".invalid")):
                        broken.setdefault(prompt.row_id, _broken(name, prompt, response))
            return scores

        tried = [prompt for split in SPLITS for prompt in self.prompts(split)[: None if column else CHECKED_ROWS]]
        failures = check_answers(
            tried,
            scored,
            str,
            gold_of=lambda prompt: None if column is None else str(prompt.gold[column]),
            by_success=True,
            max_negatives=2 * CHECKED_ROWS,
            way_out=_CHECK_WAY_OUT,
        )
        self._settle([*broken.values(), *(failure for failure in failures if failure.row_id not in broken)])

    def _scored_text(self, response_text: str) -> str:
        return strip_reasoning(response_text) if self._options["strip_reasoning"] else response_text

    def _combined(self, verdicts: Sequence[Verdict]) -> Score:
        details: dict[str, float] = {}
        for function, verdict in zip(self._functions, verdicts, strict=True):
            if verdict.reward is not None:
                details[function.name] = verdict.reward
            details |= {f"{function.name}.{part}": value for part, value in verdict.parts.items()}
        rewards = [verdict.reward for verdict in verdicts]
        if None in rewards:
            return Score(None, {"success": 0.0, **details})
        total = sum(f.weight * r for f, r in zip(self._functions, rewards, strict=True) if r is not None)
        own = [verdict.parts["success"] for verdict in verdicts if "success" in verdict.parts]
        # 0.7 + 0.2 + 0.1 is a little less than 1 in floating point.
        success = float(min(own) >= 1.0 if own else total >= self._options["success_at"] - 1e-9)
        return Score(total if self._graded else success, {"success": success, **details})

    def _parse_row(self, record: dict[str, Any]) -> ParsedRow:
        column = self._options["prompt"]
        prompt = record.get(column)
        if self._options["gold"] is not None and self._options["gold"] not in record:
            gold = self._options["gold"]
            raise RowError((record, f'has to have a column "{gold}", which env.options.gold names'))
        if isinstance(prompt, str) and prompt.strip():
            messages = render_prompt(self._template or "{question}", prompt)
            return ParsedRow(prompt, messages, record, identity=_identity(record))
        if not _is_chat(prompt):
            constraint = f'has to have a "{column}": a text, or chat messages with "role" and "content", a user\'s last'
            raise RowError((record, constraint))
        if self._template is not None:
            raise RowError((record, "is a chat, which env.prompt_template cannot fill in; leave that key blank"))
        messages = tuple({"role": message["role"], "content": message["content"]} for message in prompt)
        text = "\n".join(message["content"] for message in messages)
        return ParsedRow(text, messages, record, identity=_identity(record))


def _identity(record: Mapping[str, Any]) -> str:
    """The same for rows that are equal in every column."""
    return json.dumps(record, sort_keys=True, default=str)


def _broken(name: str, prompt: Prompt, response: str) -> Failure:
    """A row for which a function raised or returned what is no reward."""
    constraint = f"did so for row {prompt.row_id} and the response {response[:80]!r}"
    way_out = 'return a float, a dict with a float "reward", or None; write float(...) around a bool or a tensor'
    return Failure(prompt.row_id, Problem(KEY, name, constraint, way_out))


def _is_chat(prompt: Any) -> TypeGuard[list[dict[str, str]]]:
    """Whether it is a list of messages that ends with the user's."""
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(message, dict) for message in prompt)
        and all(message.get("role") in ROLES and isinstance(message.get("content"), str) for message in prompt)
        and prompt[-1]["role"] == "user"
    )


def _check_options(options: Mapping[str, Any], data_path: str | None) -> None:
    problems = []

    def check(key: str, holds: bool, constraint: str) -> None:
        if not holds:
            problems.append(Problem(f"env.options.{key}", options[key], constraint, "correct it or leave it out"))

    for key in ("concurrency", "attempts"):
        check(key, type(options[key]) is int and options[key] >= 1, "has to be a whole number of at least 1")
    check("success_at", type(options["success_at"]) in (int, float), "has to be a number")
    check("strip_reasoning", type(options["strip_reasoning"]) is bool, "has to be true or false")
    check("prompt", isinstance(options["prompt"], str), "has to name a column")
    for key in ("gold", "dataset", "dataset_config"):
        check(key, options[key] is None or isinstance(options[key], str), "has to be a text")
    if (data_path is None) == (options["dataset"] is None):
        constraint = "the rows come from files, or from a data set of the hub"
        way_out = "set either env.data_path or env.options.dataset"
        problems.append(Problem("env.data_path", data_path or "(blank)", constraint, way_out))
    if problems:
        raise UserError(*problems)


def _functions(options: Mapping[str, Any]) -> list[RewardFunction]:
    """The functions of env.options.reward: one name, or a list of `{function, weight, name}`."""
    entries = options["reward"] if isinstance(options["reward"], list) else [options["reward"]]
    functions = []
    for entry in entries:
        fields = dict(entry) if isinstance(entry, Mapping) else {"function": entry}
        location, weight = fields.get("function"), fields.get("weight", 1.0)
        name = fields.get("name", str(location).rpartition(":")[2])
        if (
            fields.keys() - {"function", "weight", "name"}
            or type(weight) not in (int, float)
            or not isinstance(name, str)
        ):
            way_out = "write package.module:function, or [{function: package.module:function, weight: 0.5}, ...]"
            raise UserError(Problem(KEY, entry, "has to be a function, with a weight and a name if wanted", way_out))
        load_function(location)
        functions.append(RewardFunction(str(location), name, float(weight), options["attempts"]))
    names = [function.name for function in functions]
    if not names or len(set(names)) < len(names) or any(name in RESERVED for name in names):
        way_out = f"give each function a `name` of its own, and none of {', '.join(RESERVED)}"
        raise UserError(Problem(KEY, names, "has to be functions with different names", way_out))
    return functions
