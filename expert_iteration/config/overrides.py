"""Overrides of the command line, one by one: what cannot be passed on to Hydra, and in which form the others are."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from expert_iteration.errors import Problem

FREE_FORM = ("env.options", "env.reward_weights", "ray.init_config")
SHORTHANDS = {"reward_model": "reward_model.name"}
"""A text that is given for one of these groups is the value of a key in it."""


def with_mode(overrides: Sequence[str], mode: str) -> list[str]:
    """The overrides with the script's own mode where none is given."""
    given = any(override.lstrip("+").startswith("mode=") for override in overrides)
    return [*([] if given else [f"mode={mode}"]), *overrides]


def normalise(overrides: Sequence[str], *, sweep: bool) -> tuple[list[str], list[Problem]]:
    """The overrides as they are passed on, and the problems of those that cannot be."""
    parser, passed, found = OverridesParser.create(), [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            key, _, value = text.partition("=")
            reason = str(error).splitlines()[0]
            way_out = (
                "write key=value, quoted for the shell as in 'key=\"a, b\"' where the value has special characters"
            )
            found.append(Problem(key, value, f"cannot be read ({reason})", way_out))
            continue
        problem = _form_problem(override, sweep)
        found += [problem] if problem else []
        passed += [] if problem else _passed_on(override)
    return passed, found


def _form_problem(override: Override, sweep: bool) -> Problem | None:
    key, value = override.key_or_group, _value_text(override)
    if override.is_sweep_override() and not sweep:
        way_out = f"add --multirun to run each of them, or write {key}=[...] for a list, or quote a text"
        return Problem(key, value, "has several values", way_out)
    if override.is_sweep_override() and not override.is_discrete_sweep():
        return Problem(key, value, "no sweep over an interval", "list the values, as in key=1,2,3")
    if override.type is OverrideType.DEL and not (_is_free_form(key) or is_hydras(override)):
        return Problem(f"~{key}", value, "a key cannot be removed", f"write {key}=null where it may stay blank")
    return None


def _value_text(override: Override) -> str:
    """The value as it was typed."""
    return str(override.input_line).partition("=")[2]


def is_hydras(override: Override) -> bool:
    """Whether the override is about Hydra itself or picks a file of a group."""
    key = override.key_or_group
    return key.startswith(("hydra.", "hydra/")) or key == "mode" or "/" in key or override.package is not None


def _is_free_form(key: str) -> bool:
    """Whether it lies below a key that takes any keys."""
    return key.startswith(tuple(f"{parent}." for parent in FREE_FORM))


def _passed_on(override: Override) -> list[str]:
    """Free-form options need no + to be added, and a whole mapping replaces the one that stands in the file."""
    key, value = override.key_or_group, _value_text(override)
    if is_hydras(override) or override.type is OverrideType.DEL:
        return [str(override.input_line)]
    elif key in FREE_FORM:
        return [f"~{key}", f"++{key}={value}"]
    elif _is_free_form(key):
        return [f"++{key}={value}"]
    elif key in SHORTHANDS and not value.startswith("{"):
        return [f"{SHORTHANDS[key]}={value}"]
    else:
        return [f"{key}={value}"]


def split_mode(overrides: Sequence[str], mode: str) -> tuple[list[str], list[Problem]]:
    found, kept = [], []
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key == "mode" and value != mode:
            found.append(
                Problem("mode", value, f"this script runs mode={mode} only", f"write mode={mode}, or leave it out")
            )
        else:
            kept.append(text)
    return kept, found


def jobs_of(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep; one job without a sweep."""
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(overrides)), None)
    return jobs


def forced(override: str) -> str:
    """Forced in, so that an unknown key composes and is reported with all the others."""
    key = override.partition("=")[0]
    return (
        override
        if key.startswith(("+", "~", "hydra.")) or key == "mode" or "/" in key or "@" in key
        else f"++{override}"
    )
