"""Collections made in the background, for a loop that trains meanwhile.

    dispatch    a collection is begun when there is room for it and it would not be too old when its turn comes
    finish      it goes into the queue, where it waits for the loop; while the queue is full, whoever made it waits
    next        the loop takes them in the order in which they finished

Every collection that was begun is handed over: none is left out because it took long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from types import TracebackType

from expert_iteration.collector import Collection
from expert_iteration.errors import ComponentError


class Producer:
    """Calls `make` in threads of its own.

    Args:
        make: makes one collection; called from several threads at a time when `in_flight` is above 1.
        total: collections to make.
        in_flight: most collections made at a time.
        queue_size: most finished collections that wait while their makers go on with the next.
        per_publish: collections that the loop consumes between two publishes, as far as the config tells.
        max_age: most publishes between the beginning of a collection and its turn; None is no bound. Where fewer
            samples are kept than `per_publish` supposes, publishes come later and collections are younger than allowed.

    Use as a context manager: leaving it waits for the threads.
    """

    def __init__(
        self,
        make: Callable[[], Collection],
        *,
        total: int,
        in_flight: int,
        queue_size: int,
        per_publish: int,
        max_age: int | None,
    ) -> None:
        self._make = make
        self._total = total
        self._queue_size = queue_size
        self._per_publish = per_publish
        self._max_age = max_age
        self._changed = Condition()
        self._begun = 0
        self._taken = 0
        self._done = 0
        """Of those taken: all but the one that the loop is training on."""
        self._done_since_publish = 0
        self._ready: deque[Collection] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._threads = [
            Thread(target=self._work, name=f"collector {index}", daemon=True) for index in range(in_flight)
        ]

    def __enter__(self) -> Producer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if error is None:
            for thread in self._threads:
                thread.join()

    @property
    def waiting(self) -> int:
        """Finished collections that have not been taken: those of the queue, and those whose makers wait for room."""
        return len(self._ready)

    def next(self, time_limit_s: float) -> Collection:
        """The next finished collection; whoever asks for it is done with those before.

        Raises:
            ComponentError: none finished within `time_limit_s` seconds.
            BaseException: what `make` raised, as soon as the loop asks, with its own traceback.
        """
        with self._changed:
            self._done_since_publish += self._taken - self._done
            self._done = self._taken
            self._changed.notify_all()
            came = self._changed.wait_for(lambda: self._ready or self._failure is not None, timeout=time_limit_s)
            if self._failure is not None:
                raise self._failure
            if not came:
                raise ComponentError(
                    f"no collection was finished within train.max_wait_s={time_limit_s:g} s; "
                    f"{self._begun - self._taken} are under way: the engine or the verifier hangs, or the limit is too "
                    "short for one collection"
                )
            collection = self._ready.popleft()
            self._taken += 1
            self._changed.notify_all()
            return collection

    def published(self) -> None:
        """Tells that all collections taken have been trained on and those begun from now on have newer weights."""
        with self._changed:
            self._done = self._taken
            self._done_since_publish = 0
            self._changed.notify_all()

    def make_again(self) -> None:
        """Lets one more collection be made than planned."""
        with self._changed:
            self._total += 1
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while self._begin():
                self._finish(self._make())
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Waits until a collection may be begun; False when none is to be begun any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self._may_begin())
            if self._is_over():
                return False
            self._begun += 1
            return True

    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _may_begin(self) -> bool:
        ahead = self._begun - self._done
        return self._begun < self._total and may_begin(
            ahead, self._done_since_publish, self._per_publish, self._max_age
        )

    def _finish(self, collection: Collection) -> None:
        """Hands it in and waits until it is among the next `queue_size`: whoever finished first is taken first."""
        with self._changed:
            place = self._taken + len(self._ready)
            self._ready.append(collection)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over() or place - self._taken < self._queue_size)


def may_begin(ahead: int, done_since_publish: int, per_publish: int, max_age: int | None) -> bool:
    """Whether a collection that is begun now will be young enough when its turn comes.

    Args:
        ahead: collections that were begun and that the loop is not done with; one may always be begun where there is
            none, or the loop would wait for ever when nothing is kept and so nothing is published.
        done_since_publish: collections that the loop has been done with since the last publish.
        per_publish: of them between two publishes.
        max_age: most publishes; None is no bound.
    """
    return ahead == 0 or max_age is None or ahead < (max_age + 1) * per_publish - done_since_publish
