"""Summary statistics, the interval of a share, and the paired test that evaluation reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, mean, pstdev


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, population standard deviation, minimum and maximum of a sample."""

    mean: float
    std: float
    """Divided by n, not n - 1: one value has the standard deviation 0, not NaN."""
    min: float
    max: float


def summarize(values: Sequence[float]) -> Summary:
    """Summary of at least one value; ValueError without any."""
    if not values:
        raise ValueError("summarize needs at least one value")
    # mean and pstdev calculate exactly: equal values have no deviation, not one of 1e-17.
    return Summary(mean=float(mean(values)), std=float(pstdev(values)), min=min(values), max=max(values))


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval (Wilson, 1927) of a share, as (low, high) within [0, 1].

    Unlike the normal approximation it stays sensible near 0 and 1 and for few trials.
    ValueError unless 0 <= successes <= trials and trials >= 1.
    """
    if not (0 <= successes <= trials and trials >= 1):
        raise ValueError(f"wilson_interval needs 0 <= successes <= trials >= 1, got {successes} of {trials}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    scale = 1 + z**2 / trials
    centre = (share + z**2 / (2 * trials)) / scale
    half_width = z / scale * sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    # At the ends the bound is exactly 0 or 1, which rounding would miss.
    low = 0.0 if successes == 0 else centre - half_width
    high = 1.0 if successes == trials else centre + half_width
    return low, high


def mcnemar_exact(fixed: int, broken: int) -> float:
    """Two-sided p value of the exact McNemar test for paired right-or-wrong outcomes.

    Only pairs that changed count: `fixed` went from wrong to right, `broken` from right to wrong. If training had no
    effect, either direction has the probability 1/2, so that p = 2 * P(X <= min(fixed, broken)) with
    X ~ Binomial(fixed + broken, 1/2), and at most 1. No changed pair gives 1.
    """
    if fixed < 0 or broken < 0:
        raise ValueError(f"mcnemar_exact needs counts, got {fixed} and {broken}")
    changed = fixed + broken
    tail = sum(comb(changed, count) for count in range(min(fixed, broken) + 1))
    return min(1.0, 2 * tail / 2**changed)
