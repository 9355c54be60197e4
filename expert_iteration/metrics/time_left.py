"""Estimate of a run's remaining time."""

from __future__ import annotations


class TimeLeft:
    """Remaining seconds of a run whose collections each generate first and train then.

    Progress stands still while a collection generates and moves while it trains, so time divided by progress would
    jump. The two are extrapolated apart: generation by the collections that remain, training by the progress that
    remains. Collections with fewer steps than planned move progress faster and so count by the time they took.

    Example of 2 collections: the first is generated in 20 s, then 5 s of steps bring the progress to 0.125. Another
    20 s of generation and 5 / 0.125 * 0.875 = 35 s of steps remain, 55 s in all.
    """

    def __init__(self, total_collections: int, now: float) -> None:
        self._total_collections = total_collections
        self._collections = 0
        self._generation_seconds = 0.0
        self._progress = 0.0
        self._training_seconds = 0.0
        self._last = now

    def collected(self, now: float) -> None:
        """A collection is generated at the second `now`; the time since the last event went into it."""
        self._generation_seconds += now - self._last
        self._collections += 1
        self._last = now

    def trained(self, progress: float, now: float) -> None:
        """A step is over at the second `now`, and the share `progress` of the run, in [0, 1], lies behind."""
        self._training_seconds += now - self._last
        self._progress = progress
        self._last = now

    def seconds(self, now: float) -> float | None:
        """Estimate at the second `now`: None while there is nothing to base it on, 0 when overdue."""
        if self._collections == 0 or self._progress == 0:
            return None
        generation = self._generation_seconds / self._collections * (self._total_collections - self._collections)
        training = self._training_seconds / self._progress * (1 - self._progress)
        return max(0.0, generation + training - (now - self._last))
