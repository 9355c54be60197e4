"""The leaves of the schema: every key with its type, meaning and constraints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from expert_iteration.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key of the schema."""

    key: str
    """With dots, as on the command line."""
    type: type
    """bool, int, float, str or dict, without the None of an optional key."""
    optional: bool
    """Whether it may stay blank."""
    help: str
    constraints: Mapping[str, Any]
    """ge, gt, le, lt and choices, as in schema.key."""

    @property
    def type_name(self) -> str:
        return {bool: "true or false", int: "an integer", float: "a number", str: "text", dict: "a mapping"}[self.type]


def leaves(section: type = RunConfig, prefix: str = "") -> Iterator[Leaf]:
    """Every leaf below a section of the schema, in the order of the schema."""
    hints = get_type_hints(section)
    for field in fields(section):
        key, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from leaves(hint, key + ".")
        else:
            optional = isinstance(hint, UnionType)
            (base,) = (arg for arg in get_args(hint) if arg is not NoneType) if optional else (hint,)
            constraints = dict(field.metadata)
            yield Leaf(key, get_origin(base) or base, optional, constraints.pop("help"), constraints)


def value_of(config: Any, key: str) -> Any:
    """The value that stands under a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config
