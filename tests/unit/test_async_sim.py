"""The simulated schedules against times worked out by hand, and the ages of real loops with sleeping stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import async_sim
from benchmarks.async_sim import Asynchronous, Outcome, Schedule, Stages, in_turn, side_by_side

SLOW_ENGINE = Stages(generate=20, train=10, publish=1)
FAST_ENGINE = Stages(generate=2, train=10, publish=1)


def simulate(stages: Stages, collections: int, **schedule: int | None) -> Outcome:
    return Asynchronous(stages, Schedule(**schedule), collections).run()  # type: ignore[arg-type]


def test_in_turn_everything_adds_up() -> None:
    assert in_turn(SLOW_ENGINE, 3) == Outcome(3 * (20 + 10 + 1), [0, 0, 0])


def test_side_by_side_the_longer_one_counts() -> None:
    # 20 alone, twice 20 beside 10 and a publish of 1, then 10 and 1 for the last.
    assert side_by_side(SLOW_ENGINE, 3) == Outcome(20 + 2 * (20 + 1) + 10 + 1, [0, 1, 1])
    assert side_by_side(FAST_ENGINE, 3) == Outcome(2 + 2 * (10 + 1) + 10 + 1, [0, 1, 1])


@pytest.mark.parametrize("in_flight", [1, 4])
def test_at_age_zero_asynchronous_is_in_turn(in_flight: int) -> None:
    assert simulate(SLOW_ENGINE, 3, in_flight=in_flight, max_age=0) == in_turn(SLOW_ENGINE, 3)


def test_at_age_one_asynchronous_is_side_by_side() -> None:
    assert simulate(SLOW_ENGINE, 3, max_age=1) == side_by_side(SLOW_ENGINE, 3)


def test_two_in_flight_between_publishes() -> None:
    # Two are generated until 20 and trained on until 40; publish until 41; and again.
    assert simulate(SLOW_ENGINE, 4, in_flight=2, per_publish=2, max_age=0, queue_size=2) == Outcome(82, [0] * 4)


def test_without_a_bound_collections_get_as_old_as_the_queue_is_long() -> None:
    # Finished at 2, 4, 6 and 8 with the first weights; the trainer publishes until 13, 24 and 35.
    assert simulate(FAST_ENGINE, 4, queue_size=4) == Outcome(2 + 4 * 11, [0, 1, 2, 3])


def test_a_full_queue_stops_the_producer() -> None:
    # The third, finished at 6, is among the next one only when the second is taken at 13; the fourth is begun then.
    assert simulate(FAST_ENGINE, 4, queue_size=1) == Outcome(2 + 4 * 11, [0, 1, 2, 2])


def test_a_publish_waits_for_what_is_being_generated() -> None:
    # Trained until 30, published from 40 on, when the second collection is there.
    assert simulate(SLOW_ENGINE, 2, max_age=1).seconds == 20 + 20 + 1 + 10 + 1


def test_the_real_loops_take_collections_at_the_simulated_ages(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--check", "--collections", "4", "--speed-up", "1000", "--in-flight", "2", "--per-publish", "1", "2"]
    assert async_sim.main([*arguments, "--max-age", "0", "--out", str(out)]) == 0
    figures: dict[str, Any] = json.loads(out.read_text())
    assert len(figures["real"]) == 4
    for name, simulated in figures["simulated"].items():
        assert figures["real"][name]["ages"] == simulated["ages"]
        assert figures["real"][name]["seconds"] > 0
