"""Signals that end a run wait until what may not be cut in two is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from expert_iteration.errors import EXIT_OUT_OF_TIME

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Puts itself before the handlers of SIGINT, SIGTERM and SIGHUP, which raise, and keeps the time of the run.

    with interrupts.installed():
        ...                           # a signal raises at once
        with interrupts.held():
            ...                       # a signal raises when the block is over; a second one at once

    `end_in` lets the run end like a signal does, with SystemExit(124). Only in the main thread of a program: elsewhere
    no signals come.

    Args:
        tell: takes a line for the user when a signal has to wait.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._handlers: dict[int, Any] = {}
        """What the signals did before."""
        self._depth = 0
        self._waiting: int | None = None
        """A signal that came in a held block."""
        self._came: int | None = None
        """The signal that ends the run."""
        self.at_once = False
        """Whether a second signal came: then nothing is saved any more."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Until the end of the block signals come here."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
        ours = [number for number in SIGNALS if callable(self._handlers[number])]  # nohup ignores SIGHUP
        for number in (*ours, signal.SIGALRM):
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number in (*ours, signal.SIGALRM):
                signal.signal(number, self._handlers[number])
            self._handlers = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes in the block raises at its end, if the block itself raises nothing."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0 and self._waiting is not None:
            number, self._waiting = self._waiting, None
            self._tell("The run ends here and saves; a second signal ends it at once.")
            self._raise(number, None)

    def end_in(self, seconds: float) -> None:
        """Lets the run end in so many seconds, in place of what was said before."""
        if self._handlers and self._came is None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._came is None:
            self._came = number
            if self._depth > 0:
                self._waiting = number
            else:
                self._raise(number, frame)
        elif self._came == signal.SIGALRM:  # the run is ending; who asks for it now is not impatient yet
            self._came = number
        elif number != signal.SIGALRM:
            self.at_once = True
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            raise SystemExit(EXIT_OUT_OF_TIME)
        self._handlers[number](number, frame)
