"""The estimate of the time left, by hand."""

from __future__ import annotations

import pytest

from expert_iteration.metrics.time_left import TimeLeft


def test_nothing_is_claimed_before_the_first_steps() -> None:
    time_left = TimeLeft(2, now=100.0)
    assert time_left.seconds(130.0) is None
    time_left.advance(0.0, 120.0)
    assert time_left.seconds(130.0) is None


def test_the_first_collection_is_extrapolated_from_its_steps() -> None:
    time_left = TimeLeft(2, now=100.0)
    time_left.advance(0.0, 120.0)  # 20 s of generation
    time_left.advance(0.125, 125.0)  # a quarter of its steps in 5 s: 40 s per collection
    assert time_left.seconds(125.0) == pytest.approx(55.0)
    assert time_left.seconds(130.0) == pytest.approx(50.0)


def test_without_a_mark_before_training_two_steps_are_needed() -> None:
    time_left = TimeLeft(1, now=0.0)
    time_left.advance(0.25, 30.0)
    assert time_left.seconds(30.0) is None
    time_left.advance(0.5, 40.0)  # a quarter in 10 s, so 20 s more
    assert time_left.seconds(40.0) == pytest.approx(20.0)


def test_later_collections_cost_the_mean_of_those_behind() -> None:
    time_left = TimeLeft(4, now=0.0)
    time_left.advance(0.25, 60.0)
    time_left.advance(0.5, 100.0)  # 50 s each
    assert time_left.seconds(100.0) == pytest.approx(100.0)
    time_left.advance(0.5, 130.0)  # generating: progress stands still, time does not
    assert time_left.seconds(130.0) == pytest.approx(70.0)


def test_a_collection_with_few_steps_does_not_upset_the_estimate() -> None:
    time_left = TimeLeft(3, now=0.0)
    for step in range(1, 11):
        time_left.advance(step / 10 / 3, 20.0 + step)  # ten steps
    assert time_left.seconds(30.0) == pytest.approx(60.0)
    time_left.advance((1 + 1 / 2) / 3, 51.0)
    time_left.advance((1 + 2 / 2) / 3, 52.0)  # two steps
    assert time_left.seconds(52.0) == pytest.approx(26.0)


def test_an_overdue_run_shows_zero_and_a_finished_one_too() -> None:
    time_left = TimeLeft(2, now=0.0)
    time_left.advance(0.5, 10.0)
    assert time_left.seconds(25.0) == 0.0
    time_left.advance(1.0, 30.0)
    assert time_left.seconds(30.0) == 0.0


def test_rounded_progress_still_ends_a_collection() -> None:
    time_left = TimeLeft(3, now=0.0)
    time_left.advance((0 + 7 / 7) * (1 / 3) - 1e-16, 10.0)
    assert time_left.seconds(10.0) == pytest.approx(20.0)
