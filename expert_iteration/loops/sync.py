"""The synchronous loop.

    for each collection:
        collector.collect()            consumes prompts and the engine's weights, produces samples
        buffer.extend()
        trainer.step() several times   consumes micro-batches from the buffer
        weight_sync.publish()          the engine gets the new weights, policy_version + 1

With `train.sync_iter=false` the next collection is sampled beside the training on this one. It is waited for before the
publish, so it comes whole from the weights before it: at most one publish stale, whatever the timing.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from expert_iteration.collector import Collection
from expert_iteration.components import Components
from expert_iteration.config import derived
from expert_iteration.loops.base import Loop, RunResult, run_loop


def run(parts: Components) -> RunResult:
    """Runs to the end. Engine, verifier and log are closed, and the log is plotted, whatever happens."""
    return run_loop(SyncLoop(parts))


class SyncLoop(Loop):
    """Collects and trains in turn."""

    def _collect_and_train(self) -> None:
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                self._collections(None if self._config.train.sync_iter else pool)
            finally:
                # A run that stops early has trained for nothing unless its weights are kept. They are saved before the
                # pool waits for a collection that is still being sampled.
                if self._unsaved_steps:
                    self._save()

    def _collections(self, pool: ThreadPoolExecutor | None) -> None:
        """All collections, each with its training; with a pool the next one is sampled beside it."""
        collector, total = self.parts.collector, derived.num_collections(self._config)
        ahead: Future[Collection] | None = None
        for index in range(total):
            collection = collector.collect() if ahead is None else collector.attach_reference(ahead.result())
            self._store(collection, index)
            ahead = pool.submit(collector.sample) if pool is not None and index + 1 < total else None
            self._train_epochs(index, has_new_samples=bool(collection.samples))
            if ahead is not None:
                wait_for([ahead])
            after_each = self._config.train.weight_update_frequency is None
            if self._unpublished_steps and (after_each or index + 1 == total):
                self._publish()
