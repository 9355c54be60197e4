"""Estimate of a run's remaining time from its progress."""

from __future__ import annotations

from math import floor


class TimeLeft:
    """Remaining seconds of a run of equal collections, each of which generates first and trains then.

    Progress stands still while a collection generates and moves while it trains, so that time divided by progress would
    jump. Instead the mean time of a whole collection is multiplied by the collections that remain. Before the first
    collection is over, its end is extrapolated from the pace of its optimizer steps.

    Example of 2 collections: generating until second 20 (progress 0), then progress 0.125 at second 25: a quarter of
    the first collection's steps in 5 s. It will take 20 + 4 * 5 = 40 s, the run 80 s, and 55 s are left.
    """

    def __init__(self, total_collections: int, now: float) -> None:
        self._total = total_collections
        self._start = now
        self._finished = 0
        self._finished_at = now
        self._training_from: tuple[float, float] | None = None
        self._seconds_per_collection: float | None = None

    def advance(self, progress: float, now: float) -> None:
        """Takes note that the share `progress` of the run, in [0, 1], lies behind at the second `now`."""
        behind = progress * self._total  # in collections
        finished = floor(behind + 1e-9)
        if finished > self._finished:
            self._finished, self._finished_at = finished, now
            self._seconds_per_collection = (now - self._start) / finished
        elif behind == 0 or self._training_from is None:
            self._training_from = behind, now
        elif finished == 0 and behind > self._training_from[0]:
            first, first_at = self._training_from
            self._seconds_per_collection = now - self._start + (1 - behind) * (now - first_at) / (behind - first)

    def seconds(self, now: float) -> float | None:
        """Estimate at the second `now`; None while there is nothing to base it on, 0 when overdue."""
        if self._seconds_per_collection is None:
            return None
        remaining = self._seconds_per_collection * (self._total - self._finished) - (now - self._finished_at)
        return max(0.0, remaining)
