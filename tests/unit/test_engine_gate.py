"""Generations side by side, a publish alone."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from expert_iteration.engine_gate import EngineGate
from expert_iteration.errors import ComponentError


def hold(gate: EngineGate, entered: Event, leave: Event) -> Thread:
    def work() -> None:
        with gate.shared():
            entered.set()
            assert leave.wait(10)

    thread = Thread(target=work)
    thread.start()
    return thread


def test_generations_run_side_by_side_and_a_publish_waits_for_all_of_them() -> None:
    gate, leave = EngineGate(), Event()
    entered = [Event(), Event()]
    threads = [hold(gate, each, leave) for each in entered]
    assert all(each.wait(10) for each in entered)

    published = Event()

    def publish() -> None:
        with gate.exclusive(10):
            published.set()

    publisher = Thread(target=publish)
    publisher.start()
    late, leave_late = Event(), Event()
    leave_late.set()
    late_thread = hold(gate, late, leave_late)
    assert not published.wait(0.2)
    assert not late.is_set()  # a publish that waits keeps new ones out
    leave.set()
    assert published.wait(10)
    assert late.wait(10)
    for thread in (*threads, publisher, late_thread):
        thread.join(10)


def test_a_generation_that_does_not_end_is_named_and_lets_others_go_on() -> None:
    gate, entered, leave = EngineGate(), Event(), Event()
    thread = hold(gate, entered, leave)
    assert entered.wait(10)
    with pytest.raises(ComponentError, match=r"waited 0\.1 s for 1 generations under way"), gate.exclusive(0.1):
        raise AssertionError("it may not get in")
    with gate.shared():  # nobody is kept out by a publish that gave up
        pass
    leave.set()
    thread.join(10)
    with gate.exclusive(10):
        pass
