"""Real signals to this process, before, in and after blocks that may not be cut in two."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from expert_iteration.loops.interrupts import SIGNALS, Interrupts


class Asked(BaseException):
    """What the program's own handler raises."""


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    def raise_it(number: int, frame: object) -> None:
        raise Asked(number)

    before = {number: signal.signal(number, raise_it) for number in SIGNALS}
    interrupts = Interrupts(lambda text: None)
    try:
        with interrupts.installed():
            yield interrupts
        assert all(signal.getsignal(number) is raise_it for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_outside_a_block_a_signal_raises_at_once(interrupts: Interrupts, number: signal.Signals) -> None:
    with pytest.raises(Asked, match=str(int(number))):
        signal.raise_signal(number)
    assert not interrupts.at_once


def test_in_a_block_it_waits_until_the_outermost_ends(interrupts: Interrupts) -> None:
    done = []
    with pytest.raises(Asked), interrupts.held():
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert not interrupts.at_once
    with interrupts.held():  # the save: nothing comes a second time
        done.append("save")
    assert done[-1] == "save"


def test_a_second_signal_does_not_wait(interrupts: Interrupts) -> None:
    done = []
    with pytest.raises(Asked), interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        done.append("first")
        signal.raise_signal(signal.SIGINT)
        done.append("second")
    assert done == ["first"]
    assert interrupts.at_once


def test_what_a_block_raises_itself_comes_first(interrupts: Interrupts) -> None:
    with pytest.raises(ValueError, match="its own"), interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("its own")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts(lambda text: None).installed():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_time_of_a_run_ends_it_once_and_leaves_time_to_save(interrupts: Interrupts) -> None:
    interrupts.end_in(1000)
    interrupts.end_in(0.01)  # in place of what was said before
    with pytest.raises(SystemExit) as stopped, interrupts.held():
        while interrupts._waiting is None:
            time.sleep(0.005)
    assert stopped.value.code == 124
    interrupts.end_in(0.01)
    with interrupts.held():
        time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)  # the scheduler's own, while the run is saving
    assert not interrupts.at_once
    with pytest.raises(Asked):
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.at_once
