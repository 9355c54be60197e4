"""The estimate of the time left, by hand."""

from __future__ import annotations

import pytest

from expert_iteration.metrics.time_left import TimeLeft


def test_nothing_is_claimed_before_the_first_steps() -> None:
    time_left = TimeLeft(2, now=100.0)
    assert time_left.seconds(110.0) is None
    time_left.collected(120.0)
    assert time_left.seconds(120.0) is None
    time_left.trained(0.0, 125.0)
    assert time_left.seconds(125.0) is None


def test_generation_and_training_are_extrapolated_apart() -> None:
    time_left = TimeLeft(2, now=100.0)
    time_left.collected(120.0)
    time_left.trained(0.125, 125.0)
    assert time_left.seconds(125.0) == pytest.approx(55.0)  # 20 of generation, 35 of steps
    assert time_left.seconds(130.0) == pytest.approx(50.0)  # the clock goes on between two events


def test_a_long_generation_does_not_make_the_estimate_jump() -> None:
    time_left = TimeLeft(4, now=0.0)
    time_left.collected(30.0)
    time_left.trained(0.25, 40.0)
    assert time_left.seconds(40.0) == pytest.approx(120.0)
    assert time_left.seconds(69.0) == pytest.approx(91.0)
    time_left.collected(70.0)
    assert time_left.seconds(70.0) == pytest.approx(90.0)


def test_collections_with_few_steps_and_with_none_count_by_the_time_they_took() -> None:
    time_left = TimeLeft(4, now=0.0)
    time_left.collected(10.0)
    time_left.trained(0.25, 20.0)  # all steps: 10 s
    time_left.collected(30.0)
    time_left.trained(0.5, 32.0)  # few steps: 2 s for the same share
    assert time_left.seconds(32.0) == pytest.approx(2 * 10.0 + 12.0)
    time_left.collected(42.0)  # nothing selected, no step
    time_left.collected(52.0)
    time_left.trained(0.875, 55.0)  # the share of the empty collection lies behind as well
    assert time_left.seconds(55.0) == pytest.approx(15.0 / 0.875 * 0.125)


def test_an_overdue_run_shows_zero_and_a_finished_one_too() -> None:
    time_left = TimeLeft(2, now=0.0)
    time_left.collected(5.0)
    time_left.trained(0.5, 10.0)
    assert time_left.seconds(25.0) == 0.0
    time_left.collected(26.0)
    time_left.trained(1.0, 30.0)
    assert time_left.seconds(30.0) == 0.0
