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

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from expert_iteration.components import Components
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
            except BaseException:
                # The pool waits for a collection that is still being sampled: it must neither keep what was trained
                # from being saved, nor go on for long.
                self._save_what_is_new()
                self.parts.engine.close()
                raise

    def _collections(self, pool: ThreadPoolExecutor | None) -> None:
        """All collections that are left, each with its training; with a pool the next one is sampled beside it."""
        collector = self.parts.collector
        for index in range(self._at.collection, self._num_collections):
            if not self._at.is_stored:
                self._store(collector.collect(), index)
            is_last = index + 1 == self._num_collections
            ahead = None if pool is None or is_last else pool.submit(collector.sample)
            self._train_epochs(index)
            if ahead is None:
                self._next_collection(index)
                continue
            wait_for([ahead])
            # What was sampled belongs to the weights before the publish: no way back between the two.
            with self._interrupts.held():
                self._next_collection(index)
                self._store(collector.attach_reference(ahead.result()), index + 1)
