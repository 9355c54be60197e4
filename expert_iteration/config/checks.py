"""What has to hold for the values of a config, key by key; cross_checks.py has what has to hold between keys."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, cast

from omegaconf import MISSING

from expert_iteration.config.cross_checks import CROSS_CHECKS
from expert_iteration.config.leaves import Leaf, leaves, value_of
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import Problem


def problems(config: RunConfig) -> list[Problem]:
    """Everything that is wrong with the values, range problems first; empty when the run may start.

    A leaf that holds MISSING was reported where the config was built; like a leaf out of its range it takes no part
    in checks across keys, so that no problem is the consequence of another.
    """
    found: list[Problem] = []
    unusable: set[str] = set()
    for leaf in leaves():
        value = value_of(config, leaf.key)
        problem = None if value == MISSING else leaf_problem(leaf, value)
        found.extend([problem] if problem else [])
        if problem or value == MISSING:
            unusable.add(leaf.key)
    usable = cast(RunConfig, _UsableKeys(config, "", frozenset(unusable)))
    for check in CROSS_CHECKS:
        found.extend(_run_where_usable(check, usable))
    return found


def leaf_problem(leaf: Leaf, value: Any) -> Problem | None:
    """What is wrong with one value of the right type."""
    if value is None:
        return None
    elif isinstance(value, str) and not value.strip():
        way_out = f"write {leaf.key}=null for blank" if leaf.optional else "give a text"
        return Problem(leaf.key, repr(value), "may not be an empty text", way_out)
    elif "choices" in leaf.constraints:
        return _choice_problem(leaf, value)
    elif isinstance(value, dict):
        return _free_form_problem(leaf, value)
    elif isinstance(value, float) and not math.isfinite(value):
        return Problem(leaf.key, value, "has to be a finite number", "give a number")
    else:
        return _range_problem(leaf, value)


BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
}


def _range_problem(leaf: Leaf, value: Any) -> Problem | None:
    wanted = [(*BOUNDS[name], bound) for name, bound in leaf.constraints.items()]
    if all(holds(value, bound) for _, holds, bound in wanted):
        return None
    listed = " and ".join(f"{sign} {bound}" for sign, _, bound in wanted)
    return Problem(leaf.key, value, f"has to be {listed}", "give a number in that range")


def _choice_problem(leaf: Leaf, value: str) -> Problem | None:
    choices = leaf.constraints["choices"]
    if value in choices:
        return None
    nearest = get_close_matches(value.lower(), choices, n=1) or [c for c in choices if value.lower().startswith(c)]
    way_out = f"write {leaf.key}={nearest[0]}" if nearest else f"take {' or '.join(choices)}"
    return Problem(leaf.key, value, f"has to be one of {', '.join(choices)}", way_out)


def _free_form_problem(leaf: Leaf, options: Mapping[str, Any]) -> Problem | None:
    entry = _not_finite(options)
    if entry is None:
        return None
    return Problem(f"{leaf.key}.{entry}", "nan or inf", "has to be a finite number", "give a number")


def _not_finite(options: Mapping[str, Any]) -> str | None:
    """Name of the first entry that is not a finite number, as in `generators[1].weight`."""
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            return str(name)
        if isinstance(value, Mapping) and (below := _not_finite(value)):
            return f"{name}.{below}"
        if isinstance(value, list) and (
            below := _not_finite({f"{name}[{index}]": item for index, item in enumerate(value)})
        ):
            return below
    return None


class _UnusableKeyError(Exception):
    """A check across keys read a key that has a problem of its own."""


class _UsableKeys:
    """Reads like a config; raises where a check reads a key that has a problem of its own."""

    def __init__(self, section: Any, prefix: str, unusable: frozenset[str]) -> None:
        self._section, self._prefix, self._unusable = section, prefix, unusable

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._unusable:
            raise _UnusableKeyError(key)
        value = getattr(self._section, name)
        return _UsableKeys(value, key + ".", self._unusable) if is_dataclass(value) else value


def _run_where_usable(check: Callable[[RunConfig], Iterator[Problem]], config: RunConfig) -> list[Problem]:
    try:
        return list(check(config))
    except _UnusableKeyError:
        return []
