"""Options of a reasoning_gym generator: from plain YAML values to its config, with every problem reported by key."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import os
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from expert_iteration.errors import Problem, UserError

_TASK_KEYS = {
    "seed": "set env.options.data_seed",
    "size": "set env.train_size and env.test_size",
    "data_seed": "set env.options.data_seed, which is of the whole task",
}

HASH_DEPENDENT = (
    "codeio",
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Generators that walk through sets of strings, or whose programs do: other rows in every process unless Python's hash
seed is fixed."""


def check_generator(name: Any, key: str) -> str:
    """The generator's name, which the configuration gives under `key`.

    Raises:
        UserError: there is none of that name (close matches are listed), or its rows would differ from run to run.
    """
    if name in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
        constraint = "its rows depend on Python's hash seed, so that no two runs would have the same data"
        raise UserError(Problem(key, name, constraint, "start with PYTHONHASHSEED=0 set"))
    if isinstance(name, str) and name in DATASETS:
        return name
    close = [] if name is None else difflib.get_close_matches(str(name), DATASETS, n=5)
    way_out = f"did you mean {', '.join(close)}" if close else f"choose one of {', '.join(sorted(DATASETS))}"
    constraint = "has to name a generator of reasoning_gym"
    raise UserError(Problem(key, "(blank)" if name is None else name, constraint, way_out))


def convert_options(generator: str, options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The options in the types that the generator's config has.

    Raises UserError with every unknown or mistyped one; `key` is where they stand in the configuration.
    """
    _, config_class = DATASETS[generator]
    hints = get_type_hints(config_class)
    known = sorted(set(hints) - set(_TASK_KEYS))
    problems = []
    converted = {}
    for name, value in options.items():
        if name in _TASK_KEYS:
            problems.append(Problem(f"{key}.{name}", value, "is not set here", _TASK_KEYS[name]))
        elif name not in hints:
            close = difflib.get_close_matches(name, known, n=3) or known
            constraint = f"is no option of the generator {generator}"
            problems.append(Problem(f"{key}.{name}", value, constraint, f"choose among {', '.join(close)}"))
        else:
            try:
                converted[name] = _convert(value, hints[name])
            except ValueError as error:
                problems.append(Problem(f"{key}.{name}", value, str(error), "give a value of that kind"))
    if problems:
        raise UserError(*problems)
    if generator == "composite":
        for index, part in enumerate(converted.get("datasets", [])):
            check_generator(part.name, f"{key}.datasets[{index}].name")
    return converted


def build_generator(generator: str, options: Mapping[str, Any], key: str, *, seed: int, size: int) -> ProceduralDataset:
    """The generator with converted options. Raises UserError when its own check of them fails."""
    dataset_class, config_class = DATASETS[generator]
    try:
        return dataset_class(config=config_class(**options, seed=seed, size=size))
    except Exception as error:  # generators check their options in their own ways, by assertions above all
        raise options_error(generator, options, key, str(error) or type(error).__name__) from error


def options_error(generator: str, options: Mapping[str, Any], key: str, complaint: str) -> UserError:
    """A UserError about the options that the generator's complaint names, or about all of them when it names none."""
    named = [name for name in options if name in complaint]
    constraint = f"the generator {generator} refuses it: {complaint.rstrip('.')[:300]}"
    way_out = "change it so that this holds"
    if named:
        return UserError(*(Problem(f"{key}.{name}", options[name], constraint, way_out) for name in named))
    return UserError(Problem(key, dict(options), constraint, way_out))


def _convert(value: Any, kind: Any) -> Any:
    """The value as `kind`, a type annotation. Raises ValueError that says what it has to be."""
    origin, arguments = get_origin(kind), get_args(kind)
    converted: Any
    if origin in (Union, types.UnionType):
        (some,) = (argument for argument in arguments if argument is not type(None))
        converted = None if value is None else _convert(value, some)
    elif origin is Literal:
        converted = _choose(value, {choice: choice for choice in arguments})
    elif tuple in (origin, kind):
        converted = tuple(_convert_items(value, arguments))
    elif origin in (list, Sequence):
        converted = _convert_items(value, arguments)
    elif kind is dict:
        converted = _convert_mapping(value)
    elif dataclasses.is_dataclass(kind):
        converted = _convert_record(value, kind)
    elif issubclass(kind, Enum):
        converted = _choose(value, {member.value: member for member in kind})
    elif kind in (datetime.date, datetime.time):
        converted = _convert_date_or_time(value, kind)
    else:
        converted = _convert_scalar(value, kind)
    return converted


def _choose(value: Any, choices: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"has to be one of {', '.join(choices)}")
    return choices[value]


def _convert_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("has to be a mapping")
    return dict(value)


def _convert_scalar(value: Any, kind: Any) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
    raise ValueError(f"has to be {names[kind]}")


def _convert_items(value: Any, kinds: tuple[Any, ...]) -> list[Any]:
    """Items of a list: each of one kind (`list[T]`, `tuple[T, ...]`), or one kind each (`tuple[T, S]`)."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("has to be a list")
    kinds = tuple(kind for kind in kinds if kind is not Ellipsis)
    if not kinds:
        return list(value)
    if len(kinds) == 1:
        return [_convert(item, kinds[0]) for item in value]
    if len(kinds) != len(value):
        raise ValueError(f"has to be a list of {len(kinds)} items")
    return [_convert(item, kind) for item, kind in zip(value, kinds, strict=True)]


def _convert_record(value: Any, kind: Any) -> Any:
    hints = get_type_hints(kind)
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if not isinstance(value, Mapping) or not set(required) <= set(value) <= set(hints):
        raise ValueError(f"has to be a mapping with the keys {', '.join(hints)}")
    return kind(**{key: _convert(item, hints[key]) for key, item in value.items()})


def _convert_date_or_time(value: Any, kind: type[datetime.date] | type[datetime.time]) -> Any:
    try:
        return value if isinstance(value, kind) else kind.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"has to be a {kind.__name__} as in ISO 8601") from None
