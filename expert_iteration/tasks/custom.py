"""The user's own task: rows with a `prompt` and anything else, and the user's own reward functions.

`reward(response: str, row: dict) -> float | dict[str, float] | None`; docs/rewards.md says the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.answers import strip_reasoning
from expert_iteration.tasks.base import MAX_REPORTED_ROWS, SPLITS, check_prompt_template, render_prompt
from expert_iteration.tasks.reward_function import KEY, RewardFunction, Verdict, load_function
from expert_iteration.tasks.row_files import ParsedRow, RowError, load_prompts
from expert_iteration.types import Prompt, Score, Split

OPTIONS: dict[str, Any] = {
    "reward": None,
    "dataset": None,
    "dataset_config": None,
    "prompt": "prompt",
    "gold": None,
    "success_at": 1.0,
    "strip_reasoning": True,
    "concurrency": 16,
    "attempts": 3,
}
"""Keys under env.options and their values where they are left out."""
ROLES = ("system", "user", "assistant")
CHECKED_ROWS = 20


class Custom:
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
    ) -> None:
        """Imports the functions and reads all rows. Raises UserError for whatever the user has to change."""
        unknown = [key for key in options if key not in OPTIONS]
        if unknown:
            way_out = f"choose among {', '.join(OPTIONS)}"
            raise UserError(
                *(Problem(f"env.options.{k}", options[k], "is no option of custom", way_out) for k in unknown)
            )
        self._options = OPTIONS | dict(options)
        _check_options(self._options, data_path)
        self._functions = _functions(self._options)
        self._graded = reward == "graded"
        self._template = prompt_template
        if prompt_template is not None:
            check_prompt_template(prompt_template)
        hub = (self._options["dataset"], self._options["dataset_config"])
        source = hub if data_path is None else Path(data_path)
        self._prompts = load_prompts(source, self._parse_row, {"train": train_size, "test": test_size})

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows: a worker that scores gets each prompt with its response."""
        return self.__dict__ | {"_prompts": {split: [] for split in SPLITS}}

    @property
    def is_async(self) -> bool:
        """Whether one of the functions is."""
        return any(function.is_async for function in self._functions)

    @property
    def concurrency(self) -> int:
        """Responses that async functions may work on at a time."""
        return int(self._options["concurrency"])

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Rows of a split, in the order of the data; no prompt stands in both splits. `gold` is the whole row."""
        return self._prompts[split]

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

    def self_check(self) -> None:
        """Calls the functions for the first rows, with an empty response and, where env.options.gold names a column,
        with the gold response of every row.

        Raises UserError where a function raises or returns what is no reward, where a gold response is no success, or
        where an empty response is one.
        """
        problems: list[Problem] = []
        for split in SPLITS:
            for position, prompt in enumerate(self.prompts(split)):
                gold = None if self._options["gold"] is None else prompt.gold[self._options["gold"]]
                if position < CHECKED_ROWS:
                    problems += self._probe(prompt, "", wanted_success=False)
                if gold is not None:
                    problems += self._probe(prompt, str(gold), wanted_success=True)
                elif position >= CHECKED_ROWS:
                    break
                if len(problems) >= MAX_REPORTED_ROWS:
                    raise UserError(*problems[:MAX_REPORTED_ROWS])
        if problems:
            raise UserError(*problems)

    def _probe(self, prompt: Prompt, response: str, *, wanted_success: bool) -> list[Problem]:
        key = f"row {prompt.row_id}"
        score = self.score(prompt, response)
        failed = [name for name in score.details if name.endswith((".raised", ".invalid"))]
        if failed:
            way_out = (
                'return a float, a dict with a float "reward", or None; write float(...) around a bool or a tensor'
            )
            return [
                Problem(KEY, name, f"did so for {key} and the response {response[:80]!r}", way_out) for name in failed
            ]
        if score.reward is None and not wanted_success:
            return []
        if bool(score.details["success"]) == wanted_success:
            return []
        constraint = (
            "its gold response has to be a success" if wanted_success else "an empty response must be no success"
        )
        way_out = "repair the row or the function, or set env.options.success_at to the reward that a success has"
        return [Problem(key, repr(response[:80]), f"{constraint} (it gets {score.reward})", way_out)]

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
        success = float(min(own) >= 1.0 if own else total >= self._options["success_at"])
        return Score(total if self._graded else success, {"success": success, **details})

    def _parse_row(self, record: dict[str, Any]) -> ParsedRow:
        column = self._options["prompt"]
        prompt = record.get(column)
        if self._options["gold"] is not None and self._options["gold"] not in record:
            raise RowError(f'has to have a column "{self._options["gold"]}", which env.options.gold names')
        if isinstance(prompt, str) and prompt.strip():
            messages = tuple(dict(message) for message in render_prompt(self._template or "{question}", prompt))
            return ParsedRow(prompt, messages, record)
        if not _is_chat(prompt):
            raise RowError(
                f'has to have a "{column}": a text, or chat messages with "role" and "content", a user\'s last'
            )
        if self._template is not None:
            raise RowError("is a chat, which env.prompt_template cannot fill in; leave that key blank")
        messages = tuple({"role": message["role"], "content": message["content"]} for message in prompt)
        return ParsedRow("\n".join(message["content"] for message in messages), messages, record)


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
    if not names or len(set(names)) < len(names) or "success" in names:
        way_out = "give each function a `name` of its own, and not `success`"
        raise UserError(Problem(KEY, names, "has to be functions with different names", way_out))
    return functions
