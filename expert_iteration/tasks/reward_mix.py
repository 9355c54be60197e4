"""The graded reward: a weighted mean of named components, each in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from expert_iteration.errors import Problem, UserError

KEY = "env.reward_weights"


class RewardMix:
    """`sum(weight * component) / sum(weights)`: 1 where every component is 1, whatever the weights."""

    def __init__(self, defaults: Mapping[str, float], given: Mapping[str, Any]) -> None:
        """Weights that are not given keep their defaults. UserError names those that cannot be."""
        problems = []
        for name, weight in given.items():
            if name not in defaults:
                constraint, way_out = "the reward has no such component", f"choose among {', '.join(defaults)}"
                problems.append(Problem(f"{KEY}.{name}", weight, constraint, way_out))
            elif type(weight) not in (int, float) or not math.isfinite(weight) or weight < 0:
                constraint = "has to be a finite number of at least 0"
                problems.append(Problem(f"{KEY}.{name}", weight, constraint, "correct it or leave it out"))
        if problems:
            raise UserError(*problems)
        self._weights = {name: float(given.get(name, default)) for name, default in defaults.items()}
        if sum(self._weights.values()) == 0:
            raise UserError(Problem(KEY, dict(given), "one weight at least has to be above 0", "raise one of them"))

    def __call__(self, components: Mapping[str, float]) -> float:
        """The reward in [0, 1]; `components` has one value for each weight."""
        # Sums in the same order, so that components of 1 give exactly 1: 0.8 + 0.1 + 0.1 is not 1 in floating point.
        total = sum(weight * components[name] for name, weight in self._weights.items())
        return total / sum(self._weights.values())
