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

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

from rich.text import Text

from expert_iteration.collector import Collection
from expert_iteration.components import METRICS_FILE, Components
from expert_iteration.config import derived
from expert_iteration.config.advice import advice
from expert_iteration.errors import Problem, UserError
from expert_iteration.evaluation import EvaluationResult, compare, comparison_report, evaluate, write_results
from expert_iteration.metrics.plots import plot_run
from expert_iteration.sample_log import append_samples
from expert_iteration.types import Batch


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run leaves besides its files."""

    before: EvaluationResult | None
    after: EvaluationResult | None


def run(parts: Components) -> RunResult:
    """Runs to the end. Verifier and log are closed, and the log is plotted, whatever happens."""
    try:
        return SyncLoop(parts).run()
    finally:
        parts.verifier.close()
        parts.logger.close()
        _plot(parts.run_dir)


def _plot(run_dir: Path) -> None:
    """Draws the plots; a failure is told and decides nothing about the run."""
    try:
        plot_run(run_dir / METRICS_FILE, run_dir)
    except Exception as error:
        print(f"The plots could not be drawn ({type(error).__name__}: {error}).", file=sys.stderr)


class SyncLoop:
    """One run of the synchronous loop, with its counters."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._config = parts.config
        self._total_steps = derived.total_planned_steps(parts.config)
        self._steps_before = 0
        """Planned steps of all earlier collections."""
        self._dialog_turns = 0
        self._empty_in_a_row = 0
        self._writes = 0
        self._evicted = 0
        self._unpublished_steps = 0
        self._unsaved_steps = 0

    def run(self) -> RunResult:
        self._tell(f"Run folder: {self._parts.run_dir}")
        for remark in advice(self._config):
            self._tell(f"Advice: {remark}")
        evaluation = self._config.eval
        before = self._evaluate("before", 0) if evaluation.at_start else None
        self._parts.logger.terminal.start(derived.num_collections(self._config))
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                self._collections(None if self._config.train.sync_iter else pool)
            finally:
                # A run that stops early has trained for nothing unless its weights are kept. They are saved before the
                # pool waits for a collection that is still being sampled.
                if self._unsaved_steps:
                    self._save()
        after = self._evaluate("after", derived.num_collections(self._config)) if evaluation.at_end else None
        if before is not None and after is not None:
            report = comparison_report(compare(before, after), evaluation.num_transcripts)
            self._parts.logger.terminal.print(report)
        if self._parts.trainer.optimizer_steps == 0:
            self._tell(
                f"Nothing was trained: of {self._dialog_turns} completions none was kept, so there is no saved model. "
                "samples.jsonl says what became of each group."
            )
        return RunResult(before, after)

    def _collections(self, pool: ThreadPoolExecutor | None) -> None:
        """All collections, each with its training; with a pool the next one is sampled beside it."""
        collector, total = self._parts.collector, derived.num_collections(self._config)
        ahead: Future[Collection] | None = None
        for index in range(total):
            collection = collector.collect() if ahead is None else collector.attach_reference(ahead.result())
            self._store(collection, index)
            ahead = pool.submit(collector.sample) if pool is not None and index + 1 < total else None
            self._train(index, has_new_samples=bool(collection.samples))
            if ahead is not None:
                wait_for([ahead])
            after_each = self._config.train.weight_update_frequency is None
            if self._unpublished_steps and (after_each or index + 1 == total):
                self._publish()

    def _store(self, collection: Collection, index: int) -> None:
        """Puts what was kept into the buffer and logs the collection; stops after too many empty ones."""
        parts, train = self._parts, self._config.train
        if train.empty_replay_buffer:
            parts.buffer.clear()
        self._writes += parts.buffer.extend(collection.samples)
        if train.max_policy_age is not None:
            self._evicted += parts.buffer.evict_older_than(parts.trainer.policy_version - train.max_policy_age)
        self._dialog_turns += collection.dialog_turns
        self._empty_in_a_row = 0 if collection.samples else self._empty_in_a_row + 1
        append_samples(parts.run_dir / "samples.jsonl", collection, index=index)
        self._log_collection(collection, index)
        if index == 0:
            for remark in reward_advice(collection):
                self._tell(f"Advice: {remark}")
        if self._empty_in_a_row >= train.max_empty_collections:
            raise UserError(_starved(train.max_empty_collections, collection))

    def _train(self, index: int, *, has_new_samples: bool) -> None:
        """`epochs` passes over the buffer. A collection that kept nothing is not trained on."""
        planned = derived.planned_steps(self._config, index)
        if has_new_samples:
            steps = derived.optimizer_steps(self._config, len(self._parts.buffer))
            for number, micro_batches in enumerate(self._optimizer_batches()):
                progress = (self._steps_before + planned * number / steps) / self._total_steps
                progress_after = (self._steps_before + planned * (number + 1) / steps) / self._total_steps
                self._step(micro_batches, progress, progress_after, index)
        self._steps_before += planned

    def _optimizer_batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each optimizer step; the last step of an epoch may have fewer."""
        size = derived.micro_batches_per_step(self._config)
        for _ in range(self._config.train.epochs):
            micro_batches = self._parts.buffer.epoch(self._config.train.optim_batch_size)
            while window := list(islice(micro_batches, size)):
                yield window

    def _step(self, micro_batches: list[Batch], progress: float, progress_after: float, index: int) -> None:
        """One optimizer step, with the publish and the saved model that fall due after it."""
        parts, train = self._parts, self._config.train
        start = perf_counter()
        with parts.logger.stage("train"):
            metrics = parts.trainer.step(micro_batches, progress=progress)
        seconds = perf_counter() - start
        steps = parts.trainer.optimizer_steps
        self._unpublished_steps += 1
        self._unsaved_steps += 1
        if train.weight_update_frequency is not None and steps % train.weight_update_frequency == 0:
            metrics |= self._publish()
        if train.checkpoint_frequency is not None and steps % train.checkpoint_frequency == 0:
            self._save()
        metrics |= {
            "progress/run": progress_after,
            "buffer/gradient_steps_per_write": steps / self._writes,
            "perf/steps_per_second": 1 / seconds,
            "perf/training_tokens_per_second": sum(batch.num_tokens for batch in micro_batches) / seconds,
            "memory/peak_gib": parts.peak_memory_gib(),
            **parts.logger.take_stage_seconds(),
        }
        parts.logger.log("step", metrics, optimizer_step=steps, collection=index)

    def _publish(self) -> dict[str, float]:
        with self._parts.logger.stage("publish"):
            self._parts.weight_sync.publish()
        self._unpublished_steps = 0
        return {"train/weights_changed_share": self._parts.weight_sync.changed_share}

    def _save(self) -> None:
        with self._parts.logger.stage("checkpoint"):
            folder = self._parts.save_model()
        self._unsaved_steps = 0
        self._tell(f"Saved: {folder}")

    def _tell(self, text: str) -> None:
        self._parts.logger.terminal.print(Text(text))

    def _log_collection(self, collection: Collection, index: int) -> None:
        parts = self._parts
        metrics = {
            **collection.metrics(),
            **{f"buffer/{name}": value for name, value in parts.buffer.stats().items()},
            **parts.logger.take_stage_seconds(),
            "selection/empty_collections": self._empty_in_a_row,
            **parts.collector.dropped(),
            "progress/dialog_turns": self._dialog_turns,
            "buffer/writes": self._writes,
            "buffer/evicted_samples": self._evicted,
            "policy/version": parts.trainer.policy_version,
            "train/weights_changed_share": parts.weight_sync.changed_share,
            "perf/generation_tokens_per_second": collection.generated_tokens / collection.generation_seconds,
            "memory/peak_gib": parts.peak_memory_gib(),
        }
        parts.logger.log("collection", metrics, optimizer_step=parts.trainer.optimizer_steps, collection=index)

    def _evaluate(self, name: str, collections_done: int) -> EvaluationResult:
        parts = self._parts
        parts.weight_sync.verify()
        with parts.logger.stage("evaluate"):
            result = evaluate(
                parts.engine,
                parts.verifier,
                parts.eval_prompts,
                encode=parts.encoder.encode,
                decode=lambda turn: parts.encoder.decode(
                    turn, include_stop=self._config.inference_model.include_stop_str_in_output
                ),
                sampling=parts.eval_sampling,
            )
        write_results(result, parts.run_dir / "eval" / f"{name}.jsonl")
        metrics = {**result.metrics(), **parts.logger.take_stage_seconds()}
        parts.logger.log("eval", metrics, optimizer_step=parts.trainer.optimizer_steps, collection=collections_done)
        return result


def reward_advice(collection: Collection) -> list[str]:
    """What the first collection's rewards suggest; never a failure."""
    values = {rollout.reward for group in collection.groups for rollout in group.rollouts if rollout.reward is not None}
    if len(values) > 2:
        return []
    return [
        f"the first collection has {len(values)} distinct rewards. Where they are only right or wrong, top-k is "
        "rejection sampling; a granular reward (env.reward=graded) gives it a choice."
    ]


def _starved(limit: int, collection: Collection) -> Problem:
    """Why the run stops when nothing is selected any more, and what to try, by what happened to the last groups."""
    ((outcome, _),) = Counter(selection.outcome for selection in collection.selections).most_common(1)
    if outcome == "tied":
        advice = (
            "all completions of each prompt get the same reward: raise env.repeats, take easier or harder problems, "
            "or a granular reward (env.reward=graded)"
        )
    elif outcome == "truncated":
        advice = "the good completions are cut short: raise inference_model.max_tokens"
    elif outcome == "unscored":
        advice = "completions could not be scored: look at samples.jsonl"
    else:
        advice = "lower selection.min_reward, or set selection.above=mean"
    return Problem(
        "train.max_empty_collections",
        limit,
        f"{limit} collections in a row selected nothing, so nothing is learned",
        advice,
    )
