"""What every loop does: evaluate, store what was collected, step, publish, save, log. The order is each loop's own."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from time import monotonic, perf_counter

import torch
from rich.text import Text

from expert_iteration import STARTED
from expert_iteration.collector import Collection
from expert_iteration.components import Components
from expert_iteration.config import derived
from expert_iteration.config.advice import advice
from expert_iteration.errors import ComponentError, Problem, UserError
from expert_iteration.evaluation import (
    EvaluationResult,
    compare,
    comparison_report,
    evaluate,
    read_results,
    write_results,
)
from expert_iteration.loops.interrupts import Interrupts
from expert_iteration.loops.progress import Progress
from expert_iteration.loops.run_state import capture, restore
from expert_iteration.metrics.plots import plot_run
from expert_iteration.run_folder import FINISHED_FILE, METRICS_FILE, SAMPLES_FILE
from expert_iteration.sample_log import append_samples
from expert_iteration.types import Batch


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run leaves besides its files."""

    before: EvaluationResult | None
    after: EvaluationResult | None


def run_loop(loop: Loop) -> RunResult:
    """Runs it to the end. Everything that was started is ended, and the log is plotted, whatever happens."""
    parts = loop.parts
    try:
        try:
            return loop.run()
        finally:
            parts.saver.wait()
    finally:
        parts.engine.close()
        parts.verifier.close()
        parts.data_logger.close()
        parts.logger.close()
        _plot(parts.run_dir)
        parts.lock.release()


def _plot(run_dir: Path) -> None:
    """Draws the plots; a failure is told and decides nothing about the run."""
    try:
        plot_run(run_dir / METRICS_FILE, run_dir)
    except Exception as error:
        print(f"The plots could not be drawn ({type(error).__name__}: {error}).", file=sys.stderr)


class Loop(ABC):
    """One run. Where it stands is in `_at`, so that it can be cut short after any step and go on."""

    def __init__(self, parts: Components) -> None:
        self.parts = parts
        self._config = parts.config
        self._total_steps = derived.total_planned_steps(parts.config)
        self._num_collections = derived.num_collections(parts.config)
        self._at = Progress() if parts.resumed is None else restore(parts, parts.resumed)
        self._unsaved_steps = 0
        self._longest_step_s = 0.0
        self._draws = derived.draws_from_buffer(parts.config)
        self._interrupts = Interrupts(self._tell)

    def run(self) -> RunResult:
        with self._interrupts.installed():
            return self._run()

    def _run(self) -> RunResult:
        self._tell(f"Run folder: {self.parts.run_dir}")
        for remark in advice(self._config):
            self._tell(f"Advice: {remark}")
        self._keep_time()
        evaluation = self._config.eval
        before = self._evaluate_before() if evaluation.at_start else None
        self.parts.logger.terminal.start(self._num_collections)
        self._train_and_save()
        after = self._evaluate("after", self._num_collections) if evaluation.at_end else None
        if before is not None and after is not None:
            report = comparison_report(compare(before, after), evaluation.num_transcripts)
            self.parts.logger.terminal.print(report)
        if self.parts.trainer.optimizer_steps == 0:
            self._tell(
                f"Nothing was trained: of {self._at.dialog_turns} completions none was kept, so there is no saved "
                "model. samples.jsonl says what became of each group."
            )
        self.parts.saver.wait()
        (self.parts.run_dir / FINISHED_FILE).touch()
        return RunResult(before, after)

    def _train_and_save(self) -> None:
        """All that is left to collect and to train. What was trained is saved even when it is cut short."""
        try:
            self._collect_and_train()
        finally:
            self._save_what_is_new()

    def _save_what_is_new(self) -> None:
        if self._unsaved_steps and not self._interrupts.at_once:
            self._save()

    @abstractmethod
    def _collect_and_train(self) -> None:
        """All collections and all steps, from `_at` on."""

    def _store(self, collection: Collection, index: int) -> None:
        """Puts what was kept into the buffer and logs the collection; stops after too many empty ones."""
        parts, train, at = self.parts, self._config.train, self._at
        with self._interrupts.held():
            if train.empty_replay_buffer:
                parts.buffer.clear()
            at.writes += parts.buffer.extend(collection.samples)
            self._drop_old()
            at.dialog_turns += collection.dialog_turns
            at.empty_in_a_row = 0 if collection.samples else at.empty_in_a_row + 1
            at.is_stored, at.has_samples = True, bool(collection.samples)
            parts.collector.stream.finish(collection.visits)
            append_samples(parts.run_dir / SAMPLES_FILE, collection, index=index)
            self._log_collection(collection, index)
            if index == 0:
                for remark in reward_advice(collection):
                    self._tell(f"Advice: {remark}")
        if at.empty_in_a_row >= train.max_empty_collections:
            raise UserError(_starved(train.max_empty_collections, collection))

    def _drop_old(self) -> None:
        """Takes samples that are older than allowed out of the buffer."""
        if (max_age := self._config.train.max_policy_age) is not None:
            self._at.evicted += self.parts.buffer.evict_older_than(self.parts.trainer.policy_version - max_age)

    def _train_epochs(self, index: int) -> None:
        """What is left of `epochs` passes over the buffer. A collection that kept nothing is not trained on."""
        at, planned = self._at, derived.planned_steps(self._config, index)
        if self._passes_over_buffer():
            steps = derived.optimizer_steps(self._config, len(self.parts.buffer))
            for micro_batches in self._optimizer_batches():
                progress = (at.planned_steps_before + planned * at.steps / steps) / self._total_steps
                progress_after = (at.planned_steps_before + planned * (at.steps + 1) / steps) / self._total_steps
                self._step(micro_batches, progress, progress_after, index)

    def _optimizer_batches(self) -> Iterator[list[Batch]]:
        """The micro-batches of each optimizer step that is left; the last step of an epoch may have fewer."""
        size, done = derived.micro_batches_per_step(self._config), self._at.steps
        first_epoch, done_of_epoch = divmod(done, self._steps_per_pass())
        for epoch in range(first_epoch, self._config.train.epochs):
            micro_batches = self.parts.buffer.epoch(self._config.train.optim_batch_size)
            number = 0
            while window := list(islice(micro_batches, size)):
                if epoch > first_epoch or number >= done_of_epoch:
                    yield window
                number += 1

    def _passes_over_buffer(self) -> bool:
        """Whether the collection is trained on in passes; what was kept of it may be too old by now."""
        return self._at.has_samples and not self._draws and len(self.parts.buffer) > 0

    def _steps_per_pass(self) -> int:
        return derived.optimizer_steps(self._config, len(self.parts.buffer)) // self._config.train.epochs

    def _next_collection(self, index: int) -> None:
        """Done with this one: publishes what falls due, and counts on."""
        after_each = self._config.train.weight_update_frequency is None
        with self._interrupts.held():
            if self._at.unpublished_steps and (after_each or index + 1 == self._num_collections):
                self._publish()
            self._at.next_collection(derived.planned_steps(self._config, index))

    def _step(self, micro_batches: Sequence[Batch], progress: float, progress_after: float, index: int) -> None:
        """One optimizer step, with the publish and the checkpoint that fall due after it."""
        parts, train = self.parts, self._config.train
        with self._interrupts.held():
            start = perf_counter()
            with parts.logger.stage("train"):
                metrics = parts.trainer.step(micro_batches, progress=progress)
            seconds = perf_counter() - start
            self._at.steps += 1
            has_trained = parts.trainer.skipped_in_a_row == 0
            self._at.unpublished_steps += has_trained
            self._unsaved_steps += has_trained
            steps = parts.trainer.optimizer_steps
            if train.weight_update_frequency is not None and steps % train.weight_update_frequency == 0:
                metrics |= self._publish()
            metrics |= {
                "progress/run": progress_after,
                "buffer/gradient_steps_per_write": steps / self._at.writes,
                "perf/steps_per_second": 1 / seconds,
                "perf/training_tokens_per_second": sum(batch.num_tokens for batch in micro_batches) / seconds,
                "memory/peak_gib": parts.peak_memory_gib(),
                **parts.logger.take_stage_seconds(),
            }
            parts.logger.log("step", metrics, optimizer_step=steps, collection=index)
            if parts.trainer.skipped_in_a_row > train.max_skipped_steps:
                raise ComponentError(self._broken(micro_batches, metrics))
            if train.checkpoint_frequency is not None and steps % train.checkpoint_frequency == 0:
                self._save()
            self._longest_step_s = max(self._longest_step_s, perf_counter() - start)
        self._keep_time()

    def _keep_time(self) -> None:
        """Lets the run end so long before train.max_time that a step and a save still fit in."""
        if (limit := self._config.train.max_time) is not None:
            reserve = 1.5 * (self._longest_step_s + self.parts.saver.estimate_s()) + 1.0
            self._interrupts.end_in(limit - (monotonic() - STARTED) - reserve)

    def _broken(self, micro_batches: Sequence[Batch], metrics: Mapping[str, float]) -> str:
        """Why the run stops at steps that are not finite; the batch of the last one is saved."""
        path, trainer = self.parts.run_dir / "broken_step.pt", self.parts.trainer
        torch.save([asdict(batch) for batch in micro_batches], path)
        return (
            f"{trainer.skipped_in_a_row} optimizer steps in a row had no finite loss and gradient (the last, step "
            f"{trainer.optimizer_steps}: loss {metrics['loss/total']}, gradient norm {metrics['optim/grad_norm']}); "
            f"train.max_skipped_steps={self._config.train.max_skipped_steps} is the most. Its batch is in {path} "
            "(torch.load), the weights are as before the first of them. Lower optimizer.lr, or compute in float32"
        )

    def _publish(self) -> dict[str, float]:
        with self.parts.logger.stage("publish"):
            self.parts.weight_sync.publish()
        self._at.unpublished_steps = 0
        return self._published()

    def _published(self) -> dict[str, float]:
        """What is known of the last publish."""
        sync = self.parts.weight_sync
        canary = {} if sync.canary_difference is None else {"policy/canary_difference": sync.canary_difference}
        return {"train/weights_changed_share": sync.changed_share, **canary}

    def _save(self) -> None:
        """Takes a checkpoint; it is written beside what comes next."""
        parts, at = self.parts, self._at
        with self._interrupts.held(), parts.logger.stage("checkpoint"):
            parts.data_logger.flush()
            is_over = at.collection == self._num_collections
            in_pass = self._passes_over_buffer() and at.steps % self._steps_per_pass() != 0
            parts.saver.save(
                capture(parts, at, is_over=is_over, in_pass=in_pass),
                step=parts.trainer.optimizer_steps,
                policy_version=parts.trainer.policy_version,
                score=at.reward,
                engine_weights=parts.weight_sync.published_weights() if self._engine_is_behind() else None,
            )
        self._unsaved_steps = 0

    def _engine_is_behind(self) -> bool:
        """Whether the engine may generate before it gets the policy's weights."""
        train = self._config.train
        publishes_first = train.weight_update_frequency is None and train.sync_iter
        return self._at.unpublished_steps > 0 and not publishes_first

    def _tell(self, text: str) -> None:
        self.parts.logger.terminal.print(Text(text))

    def _log_collection(self, collection: Collection, index: int) -> None:
        parts = self.parts
        metrics = {
            **collection.metrics(),
            **{f"buffer/{name}": value for name, value in parts.buffer.stats().items()},
            **parts.logger.take_stage_seconds(),
            "selection/empty_collections": self._at.empty_in_a_row,
            **parts.collector.dropped(),
            "progress/dialog_turns": self._at.dialog_turns,
            "buffer/writes": self._at.writes,
            "buffer/evicted_samples": self._at.evicted,
            "policy/version": parts.trainer.policy_version,
            **self._published(),
            "perf/generation_tokens_per_second": collection.generated_tokens / collection.generation_seconds,
            "memory/peak_gib": parts.peak_memory_gib(),
            **self._collection_metrics(),
        }
        self._at.reward = metrics.get("reward/mean", self._at.reward)
        parts.logger.log("collection", metrics, optimizer_step=parts.trainer.optimizer_steps, collection=index)

    def _collection_metrics(self) -> dict[str, float]:
        """What a loop adds to the metrics of a collection."""
        return {}

    def _evaluate_before(self) -> EvaluationResult:
        """With the weights that the run starts from; a resumed run has done so."""
        file = self._evaluation_file("before")
        if self.parts.resumed is not None and file.exists():
            return read_results(file)
        return self._evaluate("before", 0)

    def _evaluation_file(self, name: str) -> Path:
        return self.parts.run_dir / "eval" / f"{name}.jsonl"

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
        write_results(result, self._evaluation_file(name))
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
