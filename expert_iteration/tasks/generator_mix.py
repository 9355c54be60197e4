"""Which generators a reasoning_gym task draws from, and how many rows each of them gives.

Example: [{"generator": "gcd", "weight": 3}, {"generator": "lcm"}] and 10 rows come to 8 of gcd and 2 of lcm (7.5 and
2.5, of which the first is rounded up).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.generator_options import check_generator, convert_options


@dataclass(frozen=True, slots=True)
class Source:
    """One generator of a task, with its options."""

    label: str
    """Name of the generator, numbered from 1 where the task has it several times: chain_sum_1, chain_sum_2."""
    generator: str
    options: Mapping[str, Any]
    """In the types that the generator's config has."""
    weight: float
    key: str
    """Configuration key under which the options stand."""


def read_sources(options: Mapping[str, Any]) -> list[Source]:
    """The generators that `env.options` (less `data_seed`) names: `generator` with its options, or `generators`.

    Raises UserError with every problem of every entry.
    """
    listed = options.get("generators")
    if listed is None:
        own = {name: value for name, value in options.items() if name not in ("generator", "generators")}
        return _label([_read_source(options.get("generator"), own, 1.0, "env.options")])
    _check_list(options)
    sources: list[Source] = []
    problems: list[Problem] = []
    for index, entry in enumerate(listed):
        try:
            sources.append(_read_entry(entry, f"env.options.generators[{index}]"))
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(*problems)
    return _label(sources)


def shares(size: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `size`, by the largest remainder method.

    Of equal remainders the first is rounded up.
    """
    total = sum(map(Fraction, weights))
    quotas = [size * Fraction(weight) / total for weight in weights]
    rounded = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: rounded[index] - quotas[index])
    for index in by_remainder[: size - sum(rounded)]:
        rounded[index] += 1
    return rounded


def _check_list(options: Mapping[str, Any]) -> None:
    """Raises UserError unless `generators` is a list with entries, and all that is said about generators."""
    key, listed = "env.options.generators", options["generators"]
    problems = [
        Problem(
            f"env.options.{name}",
            value,
            "stands beside env.options.generators, whose entries say which generators there are, each with its options",
            "put it into an entry of env.options.generators, or remove it",
        )
        for name, value in options.items()
        if name != "generators" and not (name == "generator" and value is None)
    ]
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not listed:
        way_out = "write env.options.generators=[{generator: chain_sum, weight: 2}, {generator: gcd}]"
        problems.append(Problem(key, listed, "has to be a list of at least one generator", way_out))
    if problems:
        raise UserError(*problems)


def _read_entry(entry: Any, key: str) -> Source:
    if not isinstance(entry, Mapping):
        constraint = "has to be a mapping with the name of a generator, its weight and its options"
        raise UserError(Problem(key, entry, constraint, "write {generator: chain_sum, weight: 2, max_terms: 3}"))
    own = {name: value for name, value in entry.items() if name not in ("generator", "weight")}
    weight = entry.get("weight", 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    problems = []
    if not is_number or not math.isfinite(weight) or weight <= 0:
        constraint = "has to be a finite number above 0, the generator's part of the rows"
        problems.append(Problem(f"{key}.weight", weight, constraint, "give such a number, or leave it out for 1"))
    try:
        source = _read_source(entry.get("generator"), own, weight, key)
    except UserError as error:
        problems.extend(error.problems)
    if problems:
        raise UserError(*problems)
    return source


def _read_source(generator: Any, own: Mapping[str, Any], weight: float, key: str) -> Source:
    name = check_generator(generator, f"{key}.generator")
    return Source(name, name, convert_options(name, own, key), weight, key)


def _label(sources: Sequence[Source]) -> list[Source]:
    """The sources with labels of their own."""
    num_all = Counter(source.generator for source in sources)
    num_before: Counter[str] = Counter()
    labelled = []
    for source in sources:
        name = source.generator
        num_before[name] += 1
        label = f"{name}_{num_before[name]}" if num_all[name] > 1 else name
        labelled.append(Source(label, name, source.options, source.weight, source.key))
    return labelled
