"""What every loop does: evaluate, store what was collected, step, publish, save, log. The order is each loop's own."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
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


def run_loop(loop: Loop) -> RunResult:
    """Runs it to the end. Engine, verifier and log are closed, and the log is plotted, whatever happens."""
    parts = loop.parts
    try:
        return loop.run()
    finally:
        parts.engine.close()
        parts.verifier.close()
        parts.data_logger.close()
        parts.logger.close()
        _plot(parts.run_dir)


def _plot(run_dir: Path) -> None:
    """Draws the plots; a failure is told and decides nothing about the run."""
    try:
        plot_run(run_dir / METRICS_FILE, run_dir)
    except Exception as error:
        print(f"The plots could not be drawn ({type(error).__name__}: {error}).", file=sys.stderr)


class Loop(ABC):
    """One run, with its counters."""

    def __init__(self, parts: Components) -> None:
        self.parts = parts
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
        self._tell(f"Run folder: {self.parts.run_dir}")
        for remark in advice(self._config):
            self._tell(f"Advice: {remark}")
        evaluation = self._config.eval
        before = self._evaluate("before", 0) if evaluation.at_start else None
        self.parts.logger.terminal.start(derived.num_collections(self._config))
        self._collect_and_train()
        after = self._evaluate("after", derived.num_collections(self._config)) if evaluation.at_end else None
        if before is not None and after is not None:
            report = comparison_report(compare(before, after), evaluation.num_transcripts)
            self.parts.logger.terminal.print(report)
        if self.parts.trainer.optimizer_steps == 0:
            self._tell(
                f"Nothing was trained: of {self._dialog_turns} completions none was kept, so there is no saved model. "
                "samples.jsonl says what became of each group."
            )
        return RunResult(before, after)

    @abstractmethod
    def _collect_and_train(self) -> None:
        """All collections and all steps; weights that were trained are saved even when it is cut short."""

    def _store(self, collection: Collection, index: int) -> None:
        """Puts what was kept into the buffer and logs the collection; stops after too many empty ones."""
        parts, train = self.parts, self._config.train
        if train.empty_replay_buffer:
            parts.buffer.clear()
        self._writes += parts.buffer.extend(collection.samples)
        self._drop_old()
        self._dialog_turns += collection.dialog_turns
        self._empty_in_a_row = 0 if collection.samples else self._empty_in_a_row + 1
        append_samples(parts.run_dir / "samples.jsonl", collection, index=index)
        self._log_collection(collection, index)
        if index == 0:
            for remark in reward_advice(collection):
                self._tell(f"Advice: {remark}")
        if self._empty_in_a_row >= train.max_empty_collections:
            raise UserError(_starved(train.max_empty_collections, collection))

    def _drop_old(self) -> None:
        """Takes samples that are older than allowed out of the buffer."""
        if (max_age := self._config.train.max_policy_age) is not None:
            self._evicted += self.parts.buffer.evict_older_than(self.parts.trainer.policy_version - max_age)

    def _train_epochs(self, index: int, *, has_new_samples: bool) -> None:
        """`epochs` passes over the buffer. A collection that kept nothing is not trained on."""
        planned = derived.planned_steps(self._config, index)
        if has_new_samples:
            steps = derived.optimizer_steps(self._config, len(self.parts.buffer))
            for number, micro_batches in enumerate(self._optimizer_batches()):
                progress = (self._steps_before + planned * number / steps) / self._total_steps
                progress_after = (self._steps_before + planned * (number + 1) / steps) / self._total_steps
                self._step(micro_batches, progress, progress_after, index)
        self._steps_before += planned

    def _optimizer_batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each optimizer step; the last step of an epoch may have fewer."""
        size = derived.micro_batches_per_step(self._config)
        for _ in range(self._config.train.epochs):
            micro_batches = self.parts.buffer.epoch(self._config.train.optim_batch_size)
            while window := list(islice(micro_batches, size)):
                yield window

    def _step(self, micro_batches: Sequence[Batch], progress: float, progress_after: float, index: int) -> None:
        """One optimizer step, with the publish and the saved model that fall due after it."""
        parts, train = self.parts, self._config.train
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
        with self.parts.logger.stage("publish"):
            self.parts.weight_sync.publish()
        self._unpublished_steps = 0
        return self._published()

    def _published(self) -> dict[str, float]:
        """What is known of the last publish."""
        sync = self.parts.weight_sync
        canary = {} if sync.canary_difference is None else {"policy/canary_difference": sync.canary_difference}
        return {"train/weights_changed_share": sync.changed_share, **canary}

    def _save(self) -> None:
        with self.parts.logger.stage("checkpoint"):
            folder = self.parts.save_model()
        self._unsaved_steps = 0
        self._tell(f"Saved: {folder}")

    def _tell(self, text: str) -> None:
        self.parts.logger.terminal.print(Text(text))

    def _log_collection(self, collection: Collection, index: int) -> None:
        parts = self.parts
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
            **self._published(),
            "perf/generation_tokens_per_second": collection.generated_tokens / collection.generation_seconds,
            "memory/peak_gib": parts.peak_memory_gib(),
            **self._collection_metrics(),
        }
        parts.logger.log("collection", metrics, optimizer_step=parts.trainer.optimizer_steps, collection=index)

    def _collection_metrics(self) -> dict[str, float]:
        """What a loop adds to the metrics of a collection."""
        return {}

    def _evaluate(self, name: str, collections_done: int) -> EvaluationResult:
        parts = self.parts
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
