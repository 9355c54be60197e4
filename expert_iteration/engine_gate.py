"""Who may use the engine: many may generate at a time, or one may publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from expert_iteration.errors import ComponentError


class EngineGate:
    """Lets generations in side by side, and a publish alone.

    A publish that waits keeps new generations out, so that it waits for those under way and no longer: no response
    begins under one set of weights and ends under another, and none is taken from weights that have not been checked.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._generating = 0
        self._publishing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Held while something is generated."""
        with self._changed:
            self._changed.wait_for(lambda: not self._publishing)
            self._generating += 1
        try:
            yield
        finally:
            with self._changed:
                self._generating -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, time_limit_s: float) -> Iterator[None]:
        """Held while weights are replaced.

        Raises:
            ComponentError: generations under way did not end within `time_limit_s` seconds.
        """
        with self._changed:
            self._publishing = True
            try:
                if not self._changed.wait_for(lambda: self._generating == 0, timeout=time_limit_s):
                    raise ComponentError(
                        f"a publish waited {time_limit_s:g} s for {self._generating} generations under way, which is "
                        "train.max_wait_s"
                    )
            except BaseException:
                self._let_in()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._let_in()

    def _let_in(self) -> None:
        self._publishing = False
        self._changed.notify_all()
