"""Hand-computed values of the summary, the interval and the paired test."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from expert_iteration.statistics import Summary, mcnemar_exact, summarize, wilson_interval


def test_summary_uses_the_population_deviation() -> None:
    # mean 2; squared distances 4, 0, 4, 0 -> variance 2
    assert summarize([0.0, 2.0, 4.0, 2.0]) == Summary(mean=2.0, std=sqrt(2.0), min=0.0, max=4.0)


def test_EI_09_one_value_has_deviation_zero_and_no_nan() -> None:
    assert summarize([0.1]) == Summary(mean=0.1, std=0.0, min=0.1, max=0.1)


def test_equal_values_have_exactly_no_deviation() -> None:
    assert summarize([0.1] * 3) == Summary(mean=0.1, std=0.0, min=0.1, max=0.1)


def test_summary_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_of_published_cases(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_is_scipys_and_holds_the_share(case: tuple[int, int]) -> None:
    successes, trials = case
    low, high = wilson_interval(successes, trials)
    reference = binomtest(successes, trials).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=1e-12)
    assert 0 <= low <= successes / trials <= high <= 1


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_interval_refuses_what_is_no_share(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="wilson_interval"):
        wilson_interval(successes, trials)


@pytest.mark.parametrize(
    ("fixed", "broken", "p_value"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (6, 2, 2 * (1 + 8 + 28) / 256),
        (3, 3, 1.0),  # twice P(X <= 3) is more than 1
        (1, 2, 1.0),  # 2 * (1 + 3) / 8
    ],
)
def test_mcnemar_by_hand(fixed: int, broken: int, p_value: float) -> None:
    assert mcnemar_exact(fixed, broken) == pytest.approx(p_value, rel=1e-12)


def test_mcnemar_of_a_large_change_neither_overflows_nor_vanishes() -> None:
    assert mcnemar_exact(1000, 0) == 2.0**-999
    assert mcnemar_exact(1000, 900) == pytest.approx(binomtest(900, 1900).pvalue, rel=1e-9)


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="counts"):
        mcnemar_exact(-1, 3)
