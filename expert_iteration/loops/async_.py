"""The asynchronous loop: collections are made in the background while the policy trains.

    background                        this thread
    collector.sample()  -> queue ->   collector.attach_reference(), buffer.extend()
                                      trainer.step() for every optimizer batch of samples that came in
                                      weight_sync.publish() every `train.weight_update_frequency` steps

Each sample that comes in pays for `train.epochs` samples drawn from the buffer, so the trainer takes as many steps as
in the synchronous loop, and what is left of a step is carried over. With `train.weight_update_frequency=null` a
collection is trained on as in the synchronous loop, with a publish after it; with `train.max_policy_age=0` on top both
loops do the same.

A publish waits for the generations under way (engine_gate.py). Before it the engine has to prove that it still holds
what was published last, so everything that was sampled in between came from weights that were checked.
"""

from __future__ import annotations

from time import perf_counter

from expert_iteration.collector import Collection
from expert_iteration.components import Components
from expert_iteration.config import derived
from expert_iteration.loops.base import Loop, RunResult, run_loop
from expert_iteration.loops.producer import Producer


def run(parts: Components) -> RunResult:
    """Runs to the end. Engine, verifier and log are closed, and the log is plotted, whatever happens."""
    return run_loop(AsyncLoop(parts))


class AsyncLoop(Loop):
    """Trains while the next collections are made."""

    def __init__(self, parts: Components) -> None:
        super().__init__(parts)
        self._waited_s = 0.0
        self._producer = Producer(
            parts.collector.sample,
            total=self._num_collections - self._at.collection - self._at.is_stored,
            in_flight=derived.collections_in_flight(self._config),
            queue_size=derived.queue_size(self._config),
            per_publish=derived.collections_per_publish(self._config),
            max_age=self._config.train.max_policy_age,
        )

    def _collect_and_train(self) -> None:
        with self._producer:
            for index in range(self._at.collection, self._num_collections):
                if not self._at.is_stored:
                    collection = self.parts.collector.attach_reference(self._next())
                    with self._interrupts.held():
                        self._pay(collection)
                        self._store(collection, index)
                if self._draws:
                    self._train_draws(index)
                else:
                    self._train_epochs(index)
                self._next_collection(index)

    def _next(self) -> Collection:
        """The next collection that is young enough; one that is not is made again, once, where the config says so."""
        train = self._config.train
        start = perf_counter()
        while True:
            collection = self._producer.next(train.max_wait_s)
            age = self.parts.trainer.policy_version - collection.policy_version
            too_old = train.max_policy_age is not None and age > train.max_policy_age
            if not (too_old and train.stale_samples == "reissue" and self.parts.collector.take_back(collection)):
                self._waited_s = perf_counter() - start
                return collection
            self._at.reissued += collection.dialog_turns
            self._producer.make_again()

    def _pay(self, collection: Collection) -> None:
        """Counts the steps that the new samples and what was left over pay for."""
        at, size = self._at, derived.optimizer_batch_size(self._config)
        unspent = at.unspent_samples + self._config.train.epochs * len(collection.samples)
        at.steps_due, at.unspent_samples = divmod(unspent, size)

    def _train_draws(self, index: int) -> None:
        """What is left of the steps that are due."""
        at, buffer, size = self._at, self.parts.buffer, derived.optimizer_batch_size(self._config)
        while at.steps < at.steps_due:
            self._drop_old()
            if len(buffer) == 0:
                return
            done = at.steps / at.steps_due, (at.steps + 1) / at.steps_due
            progress, progress_after = ((index + share) / self._num_collections for share in done)
            self._step(buffer.draw(size, self._config.train.optim_batch_size), progress, progress_after, index)

    def _publish(self) -> dict[str, float]:
        with self.parts.engine_gate.exclusive(self._config.train.max_wait_s):
            self.parts.weight_sync.verify()
            metrics = super()._publish()
        self._producer.published()
        return metrics

    def _collection_metrics(self) -> dict[str, float]:
        return {
            "async/queue_length": self._producer.waiting,
            "async/wait_seconds": self._waited_s,
            "async/reissued_turns": self._at.reissued,
        }
