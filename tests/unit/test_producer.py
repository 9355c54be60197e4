"""Collections in the background: order, bounds, ends and failures. What is made here are numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import Event, Lock
from typing import Any

import pytest

from expert_iteration.errors import ComponentError
from expert_iteration.loops.producer import Producer


def make_producer(make: Callable[[], Any], **options: Any) -> Producer:
    defaults = {"total": 4, "in_flight": 1, "queue_size": 8, "per_publish": 1, "max_age": None}
    return Producer(make, **(defaults | options))


class Numbers:
    """Hands out 0, 1, 2, ...; waits for `go` before each from `free` on."""

    def __init__(self, free: int = 100) -> None:
        self.begun: list[int] = []
        self._ids = count()
        self._free = free
        self._lock = Lock()
        self.go = Event()
        self.grew = Event()

    def __call__(self) -> int:
        with self._lock:
            number = next(self._ids)
            self.begun.append(number)
            self.grew.set()
        if number >= self._free:
            assert self.go.wait(10)
        return number


def settles(numbers: Numbers, size: int) -> bool:
    """Whether exactly `size` have been begun, also a while later."""
    while len(numbers.begun) < size and numbers.grew.wait(10):
        numbers.grew.clear()
    numbers.grew.clear()
    return not numbers.grew.wait(0.2) and len(numbers.begun) == size


def test_everything_is_handed_over_in_order() -> None:
    with make_producer(Numbers()) as producer:
        assert [producer.next(10) for _ in range(4)] == [0, 1, 2, 3]


def test_a_slow_one_is_handed_over_too() -> None:
    """The first never ends before the others have; with a second thread they overtake it, and it comes last."""
    slow, first = Event(), Lock()

    def make() -> str:
        if first.acquire(blocking=False):
            assert slow.wait(10)
            return "slow"
        return "fast"

    with make_producer(make, in_flight=2) as producer:
        assert [producer.next(10) for _ in range(3)] == ["fast"] * 3
        slow.set()
        assert producer.next(10) == "slow"


def test_a_full_queue_makes_the_producer_wait() -> None:
    numbers = Numbers()
    with make_producer(numbers, total=10, queue_size=2) as producer:
        assert settles(numbers, 3)  # two wait in the queue, and with the third its maker
        assert producer.waiting == 3
        assert producer.next(10) == 0
        assert settles(numbers, 4)
        for expected in range(1, 10):
            assert producer.next(10) == expected


def test_one_that_finds_no_room_is_not_overtaken() -> None:
    """Three make and one waits: every time there is room, the one that has waited longest gets it."""
    with make_producer(Numbers(), total=60, in_flight=3, queue_size=1) as producer:
        handed = [producer.next(10) for _ in range(60)]
    assert sorted(handed) == list(range(60))
    # Of the two others each may have finished before it began to wait.
    assert all(abs(number - place) <= 3 for place, number in enumerate(handed))


@pytest.mark.parametrize(("max_age", "per_publish", "ahead"), [(0, 1, 1), (1, 1, 2), (0, 3, 3), (2, 2, 6)])
def test_no_more_is_begun_than_will_be_young_enough(max_age: int, per_publish: int, ahead: int) -> None:
    """`per_publish` are consumed between publishes: of `(max_age + 1) * per_publish` the last is `max_age` old."""
    numbers = Numbers()
    with make_producer(numbers, total=20, max_age=max_age, per_publish=per_publish) as producer:
        assert settles(numbers, ahead)
        for _ in range(per_publish):
            producer.next(10)
        if max_age > 0:
            assert settles(numbers, ahead)
        producer.published()
        assert settles(numbers, ahead + per_publish)
        for _ in range(20 - per_publish):
            producer.next(10)
            producer.published()


def test_it_goes_on_when_publishes_come_later_than_supposed() -> None:
    """Nothing was kept, so nothing is published: one is made at a time, and never none."""
    numbers = Numbers()
    with make_producer(numbers, total=6, max_age=0, per_publish=2) as producer:
        assert [producer.next(10) for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_EI_40_what_was_raised_reaches_the_loop_with_its_traceback() -> None:
    def make() -> int:
        raise ZeroDivisionError("the reward's third call")

    with pytest.raises(ZeroDivisionError, match="third call") as raised, make_producer(make) as producer:
        producer.next(10)
    assert any(entry.name == "make" for entry in raised.traceback)


def test_EI_40_one_that_never_ends_is_named_within_the_limit() -> None:
    numbers = Numbers(free=1)
    with pytest.raises(ComponentError, match=r"max_wait_s=0\.2 s; 1 are under way"), make_producer(numbers) as producer:
        assert producer.next(10) == 0
        producer.next(0.2)
    numbers.go.set()


def test_one_more_can_be_asked_for() -> None:
    with make_producer(Numbers(), total=1) as producer:
        assert producer.next(10) == 0
        producer.make_again()
        assert producer.next(10) == 1
