"""Metrics of what the collector makes, written to the run's log from a thread of their own.

Add metrics of your own in a subclass, and name it in `logging.data_logger`:

    class MyLogger(RemoteDataLogger):
        def log_data(self, data: CollectedData) -> dict[str, float]:
            lengths = [len(rollout.text) for group in data.groups for rollout in group.rollouts]
            return {**super().log_data(data), "collector/characters_max": max(lengths)}
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter

from expert_iteration.metrics.logger import MetricsLogger
from expert_iteration.selection import is_scored
from expert_iteration.statistics import summarize
from expert_iteration.types import POLICY, RolloutGroup


@dataclass(frozen=True, slots=True)
class CollectedData:
    """What one call of the collector gave, before selection."""

    groups: Sequence[RolloutGroup]
    index: int
    """How many came before it."""
    optimizer_step: int
    """Steps that had been taken when it came."""
    seconds_since_last: float | None
    """Between the one before and this; None for the first."""


class RemoteDataLogger:
    """Takes what the collector hands over and returns at once; a thread makes metrics of it and logs them.

    However slow the log is, the collector never waits for it, and `close` waits until everything is written. Metrics
    that fail are told once and change nothing about the run.
    """

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger
        self._queue: SimpleQueue[CollectedData | Event | None] = SimpleQueue()
        self._count = 0
        self._last: float | None = None
        self._failed = False
        self._thread = Thread(target=self._work, name="data logger", daemon=True)
        self._thread.start()

    def submit(self, groups: Sequence[RolloutGroup], optimizer_step: int) -> None:
        """Hands over what one call of the collector gave."""
        now = perf_counter()
        since = None if self._last is None else now - self._last
        self._last = now
        self._queue.put(CollectedData(groups, self._count, optimizer_step, since))
        self._count += 1

    def count_from(self, index: int) -> None:
        """What comes next has this index: in a run that is resumed."""
        self._count = index

    def flush(self, time_limit_s: float = 10.0) -> bool:
        """Waits until what was handed over so far is logged, and tells whether it was in time."""
        reached = Event()
        self._queue.put(reached)
        return reached.wait(time_limit_s)

    def log_data(self, data: CollectedData) -> dict[str, float]:
        """Metrics of one call of the collector, all named `collector/...`: rewards and response lengths in tokens with
        mean, population standard deviation, minimum and maximum, policy versions with mean, minimum and maximum, and
        the time since the one before. Rewards describe scored completions and are left out where there are none."""
        rollouts = [rollout for group in data.groups for rollout in group.rollouts if rollout.source == POLICY]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None and is_scored(rollout.reward)]
        lengths = [rollout.num_response_tokens for rollout in rollouts]
        versions = [rollout.policy_version for rollout in rollouts]
        metrics: dict[str, float] = {}
        if rewards:
            reward = summarize(rewards)
            metrics |= {"reward_mean": reward.mean, "reward_std": reward.std}
            metrics |= {"reward_min": reward.min, "reward_max": reward.max}
        if rollouts:
            length, version = summarize(lengths), summarize(versions)
            metrics |= {"response_tokens_mean": length.mean, "response_tokens_std": length.std}
            metrics |= {"response_tokens_min": length.min, "response_tokens_max": length.max}
            metrics |= {"policy_version_mean": version.mean}
            metrics |= {"policy_version_min": version.min, "policy_version_max": version.max}
        if data.seconds_since_last is not None:
            metrics["seconds_between_batches"] = data.seconds_since_last
        return {f"collector/{name}": value for name, value in metrics.items()}

    def close(self) -> None:
        """Waits until everything that was handed over is logged; a second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (data := self._queue.get()) is not None:
            if isinstance(data, Event):
                data.set()
                continue
            try:
                metrics = self.log_data(data)
                self._logger.log("collector", metrics, optimizer_step=data.optimizer_step, collection=data.index)
            except Exception:
                if not self._failed:
                    self._failed = True
                    print("The data logger failed; the run goes on without its metrics:", file=sys.stderr)
                    traceback.print_exc()
