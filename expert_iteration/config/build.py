"""From plain values to a typed config: unknown keys, missing keys and wrong types, all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from omegaconf import MISSING

from expert_iteration.config import retired
from expert_iteration.config.leaves import Leaf, leaves
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import Problem

LEAVES = {leaf.key: leaf for leaf in leaves()}


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Stands where an interpolation `${...}` could not be resolved."""

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


def build(values: Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """The typed config of plain nested values, and every problem of its keys and types.

    A leaf with a problem holds MISSING. 1000.0 is taken for the integer 1000 (`1e3` is a float on the command line),
    an integer for a float or for text; nothing else is converted.
    """
    problems: list[Problem] = []
    missing: list[str] = []
    config = _build_section(RunConfig, values, "", problems, missing)
    if missing:
        problems.append(
            Problem(
                ", ".join(missing),
                MISSING,
                "every key needs a value",
                "give them, or start the file's defaults list with ei_gsm8k, which has every key",
            )
        )
    return config, problems


def _build_section(
    section: type, values: Mapping[str, Any], prefix: str, problems: list[Problem], missing: list[str]
) -> Any:
    hints = get_type_hints(section)
    names = [field.name for field in fields(section)]
    for name, value in values.items():
        if name not in names:
            problems.extend(unknown_keys(prefix + str(name), value))
    built: dict[str, Any] = {}
    for name in names:
        key, value = prefix + name, values.get(name, MISSING)
        if is_dataclass(hints[name]):
            if not isinstance(value, Mapping) and value != MISSING:
                problems.append(Problem(key, value, "a group of keys", f"set its keys, as in {_first_key(key)}=..."))
                built[name] = hints[name]()
            else:
                below = value if isinstance(value, Mapping) else {}
                built[name] = _build_section(hints[name], below, key + ".", problems, missing)
        elif value == MISSING:
            built[name] = MISSING
            missing.append(key)
        else:
            problem = _type_problem(LEAVES[key], value)
            built[name] = MISSING if problem else _convert(LEAVES[key], value)
            problems.extend([problem] if problem else [])
    return section(**built)


def _first_key(section_key: str) -> str:
    return next(key for key in LEAVES if key.startswith(section_key + "."))


def unknown_keys(key: str, value: Any) -> list[Problem]:
    """The problems of a key that the schema does not have: retired, or with the nearest keys that it has."""
    if refusal := retired.refusal(key):
        return [Problem(key, "{...}" if isinstance(value, Mapping) else _yaml_scalar(value), *refusal)]
    if isinstance(value, Mapping) and value:
        return [problem for name, below in value.items() for problem in unknown_keys(f"{key}.{name}", below)]
    nearest = nearest_keys(key)
    way_out = f"perhaps {' or '.join(nearest)} is meant" if nearest else "docs/configuration.md lists every key"
    return [Problem(key, _yaml_scalar(value), "no such key", way_out)]


def nearest_keys(key: str) -> list[str]:
    """At most four keys that the user may have meant: the same last name elsewhere, else a similar spelling."""
    section, _, last = key.rpartition(".")
    named: dict[str, list[str]] = {}
    for known in LEAVES:
        named.setdefault(known.rpartition(".")[2], []).append(known)
    if last in named:
        return named[last][:4]
    siblings = [name for name in named if f"{section}.{name}".removeprefix(".") in LEAVES]
    if close := get_close_matches(last, siblings, n=1):
        return [f"{section}.{close[0]}".removeprefix(".")]
    return [known for name in get_close_matches(last, named, n=1, cutoff=0.7) for known in named[name][:3]]


def _type_problem(leaf: Leaf, value: Any) -> Problem | None:
    blank = f"{leaf.key}=null"
    if isinstance(value, Unresolved):
        return _unresolved_problem(leaf.key, value)
    elif value is None:
        return None if leaf.optional else Problem(leaf.key, "null", "may not be blank", f"give {leaf.type_name}")
    elif value == "None" or (leaf.optional and isinstance(value, str) and value.lower() == "none"):
        way_out = f"write {blank} for blank" if leaf.optional else f"give {leaf.type_name}"
        return Problem(leaf.key, value, f"has to be {leaf.type_name}; this is the word '{value}', not a blank", way_out)
    elif not _fits(leaf, value):
        blank_too = f", or {blank} for blank" if leaf.optional else ""
        shown = repr(value) if isinstance(value, str) else _yaml_scalar(value)
        return Problem(leaf.key, shown, f"has to be {leaf.type_name}", f"give {leaf.type_name}{blank_too}")
    else:
        return _free_form_problem(leaf.key, value) if leaf.type is dict else None


def _unresolved_problem(key: str, value: Unresolved) -> Problem:
    return Problem(key, value, value.reason, "name an existing key in the interpolation, or give the value")


def _yaml_scalar(value: Any) -> Any:
    """As it would be written on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


def _fits(leaf: Leaf, value: Any) -> bool:
    if leaf.type is bool:
        return isinstance(value, bool)
    elif leaf.type is int:
        return type(value) is int or (isinstance(value, float) and value.is_integer())
    elif leaf.type is float:
        return type(value) in (int, float)
    elif leaf.type is str:
        return isinstance(value, str) or type(value) is int
    elif leaf.type is dict:
        return isinstance(value, Mapping)
    raise AssertionError(f"the schema has no type {leaf.type}")


def _convert(leaf: Leaf, value: Any) -> Any:
    return value if value is None else leaf.type(value)


def _free_form_problem(key: str, value: Any) -> Problem | None:
    """The first entry of a free-form mapping that has no value."""
    for below, entry in _entries(key, value):
        if isinstance(entry, Unresolved):
            return _unresolved_problem(below, entry)
        if entry == MISSING:
            return Problem(below, entry, "needs a value", f"give it, or remove it with ~{below}")
    return None


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _entries(f"{key}.{name}", entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _entries(f"{key}[{index}]", entry)
    else:
        yield key, value
