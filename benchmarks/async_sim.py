#!/usr/bin/env python3
"""How long a run takes for given times of generation, training and publishing: in turn, side by side, asynchronous.

Nothing is measured unless `--check` is given: the schedules of the loops are played through in simulated time. A
collection takes as long beside others as alone, which holds for an engine that is not full.

    python -m benchmarks.async_sim --generate 20 --train 10 --publish 1

`--check` also runs the real loops on a tiny model, with stages that sleep these times divided by `--speed-up`.

    python -m benchmarks.async_sim --check --collections 24
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean
from time import perf_counter, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness, tiny
from expert_iteration.collector import Collection
from expert_iteration.components import Components
from expert_iteration.config.loader import load
from expert_iteration.loops import async_, sync
from expert_iteration.loops.producer import may_begin
from expert_iteration.runtime import local

KEPT = 4
"""Samples of a collection in a real run, and of its optimizer step."""


@dataclass(frozen=True)
class Stages:
    """Seconds of one collection's generation, of training on it, and of a publish."""

    generate: float
    train: float
    publish: float


@dataclass(frozen=True)
class Schedule:
    """How the asynchronous loop is set."""

    in_flight: int = 1
    per_publish: int = 1
    """Collections that are trained on between two publishes: `train.weight_update_frequency` as collections."""
    max_age: int | None = None
    queue_size: int = 1


@dataclass
class Outcome:
    """What a run took, and how old in publishes each collection was when its turn came."""

    seconds: float = 0.0
    ages: list[int] = field(default_factory=list)
    dropped: int = 0
    """Collections that were too old."""


def in_turn(stages: Stages, collections: int) -> Outcome:
    """`mode=sync`."""
    seconds = collections * (stages.generate + stages.train + stages.publish)
    return Outcome(seconds, [0] * collections)


def side_by_side(stages: Stages, collections: int) -> Outcome:
    """`mode=sync train.sync_iter=false`: all but the first are generated while the one before is trained on."""
    beside = (collections - 1) * (max(stages.generate, stages.train) + stages.publish)
    seconds = stages.generate + beside + stages.train + stages.publish
    return Outcome(seconds, [0] + [1] * (collections - 1))


class Asynchronous:
    """The asynchronous loop in simulated time.

    Each process is a generator. It yields seconds to spend, or a condition to wait for.
    """

    def __init__(self, stages: Stages, schedule: Schedule, collections: int) -> None:
        self._stages, self._schedule, self._collections = stages, schedule, collections
        self._begun = self._taken = self._done = self._done_since_publish = 0
        self._version = self._generating = 0
        self._publishing = False
        self._ready: deque[int] = deque()
        """Versions of the weights of the finished collections."""
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Plays the whole run."""
        now = 0.0
        processes = [self._trainer(), *(self._producer() for _ in range(self._schedule.in_flight))]
        trainer = processes[0]
        waiting: dict[Iterator[Any], float | Callable[[], bool]] = dict.fromkeys(processes, now)
        while trainer in waiting:
            due = self._due(waiting, now)
            if due is None:
                now = min(wake for wake in waiting.values() if isinstance(wake, float))
                continue
            wake = next(due, None)
            if wake is None:
                del waiting[due]
            else:
                waiting[due] = wake if callable(wake) else now + wake
        self.outcome.seconds = now
        return self.outcome

    @staticmethod
    def _due(waiting: dict[Iterator[Any], float | Callable[[], bool]], now: float) -> Iterator[Any] | None:
        """A process that can go on now."""
        for process, wake in waiting.items():
            if wake() if callable(wake) else wake <= now:
                return process
        return None

    def _producer(self) -> Iterator[float | Callable[[], bool]]:
        while self._begun < self._collections:
            yield self._may_begin
            if self._begun == self._collections:  # another one took the last
                return
            self._begun += 1
            yield lambda: not self._publishing
            self._generating += 1
            version = self._version
            yield self._stages.generate
            self._generating -= 1
            place = self._taken + len(self._ready)
            self._ready.append(version)
            yield lambda place=place: place - self._taken < self._schedule.queue_size  # type: ignore[misc]

    def _may_begin(self) -> bool:
        ahead = self._begun - self._done
        schedule = self._schedule
        room = may_begin(ahead, self._done_since_publish, schedule.per_publish, schedule.max_age)
        return self._begun == self._collections or room

    def _trainer(self) -> Iterator[float | Callable[[], bool]]:
        trained = 0
        for index in range(self._collections):
            self._done_since_publish += self._taken - self._done
            self._done = self._taken
            yield lambda: bool(self._ready)
            age = self._version - self._ready.popleft()
            self._taken += 1
            self.outcome.ages.append(age)
            if self._schedule.max_age is not None and age > self._schedule.max_age:
                self.outcome.dropped += 1
                continue
            yield self._stages.train
            trained += 1
            if trained % self._schedule.per_publish == 0 or index + 1 == self._collections:
                self._publishing = True
                yield lambda: self._generating == 0
                yield self._stages.publish
                self._version += 1
                self._publishing = False
                self._done, self._done_since_publish = self._taken, 0


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    stages = Stages(args.generate, args.train, args.publish)
    rows = {"in turn": in_turn(stages, args.collections), "side by side": side_by_side(stages, args.collections)}
    schedules: dict[str, Schedule | None] = {"in turn": None, "side by side": None}
    for in_flight, per_publish, max_age in product(args.in_flight, args.per_publish, args.max_age):
        schedule = Schedule(in_flight, per_publish, max_age, queue_size=max(in_flight, per_publish))
        name = f"asynchronous, {in_flight} in flight, {per_publish} per publish, age at most {max_age}"
        rows[name], schedules[name] = Asynchronous(stages, schedule, args.collections).run(), schedule
    real = {name: check(stages, args, name, schedule) for name, schedule in schedules.items()} if args.check else {}
    print(table(rows, real, args))
    harness.write_json(args.out, args, {"simulated": _plain(rows), "real": _plain(real)})
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", type=float, default=20.0, help="seconds of a collection")
    parser.add_argument("--train", type=float, default=10.0, help="seconds of training on a collection")
    parser.add_argument("--publish", type=float, default=1.0, help="seconds of a publish")
    parser.add_argument("--collections", type=int, default=64)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4], help="train.collections_in_flight")
    parser.add_argument("--per-publish", type=int, nargs="+", default=[1, 4], help="collections between publishes")
    parser.add_argument("--max-age", type=int, nargs="+", default=[0, 1, 4], help="train.max_policy_age")
    parser.add_argument("--check", action="store_true", help="also run the real loops, with stages that sleep")
    parser.add_argument("--speed-up", type=float, default=40.0, help="the real stages sleep these times divided by it")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    return parser.parse_args(arguments)


def table(rows: dict[str, Outcome], real: dict[str, Outcome], args: argparse.Namespace) -> str:
    base = rows["in turn"].seconds
    lines = []
    for name, outcome in rows.items():
        line = [name, f"{outcome.seconds:.0f}", f"{base / outcome.seconds:.2f}"]
        line += [f"{mean(outcome.ages):.2f}", str(max(outcome.ages)), str(outcome.dropped)]
        if real:
            line += [f"{real[name].seconds:.0f}", f"{real[name].seconds / outcome.seconds - 1:+.1%}"]
            line += [f"{mean(real[name].ages):.2f}", str(max(real[name].ages))]
        lines.append(line)
    header = ["", "s", "speed-up", "mean age", "oldest", "dropped"]
    header += ["real s", "more", "mean age", "oldest"] if real else []
    title = (
        f"{args.collections} collections: {args.generate:g} s to generate, {args.train:g} s to train, "
        f"{args.publish:g} s to publish"
    )
    return harness.table(title, header, lines)


def check(stages: Stages, args: argparse.Namespace, name: str, schedule: Schedule | None) -> Outcome:
    """A real run with sleeping stages; its seconds are multiplied by the speed-up."""
    asleep = Stages(*(seconds / args.speed_up for seconds in (stages.generate, stages.train, stages.publish)))
    with tempfile.TemporaryDirectory() as folder:
        outcome = real_run(asleep, args.collections, Path(folder), name, schedule)
    outcome.seconds *= args.speed_up
    return outcome


def real_run(stages: Stages, collections: int, folder: Path, name: str, schedule: Schedule | None) -> Outcome:
    """One of the loops with its real producer, gate, buffer, trainer and publishes."""
    mode = "sync" if schedule is None else "async"
    overrides = [
        *tiny.overrides(folder),
        f"mode={mode}",
        "num_threads=1",
        f"env.repeats={KEPT}",
        f"train.dialog_turns_per_batch={KEPT}",
        f"train.total_dialog_turns={KEPT * collections}",
        f"train.topk_size={KEPT}",
        f"train.optim_batch_size={KEPT}",
        "train.gradient_accumulation_steps=1",
        "train.epochs=1",
        "train.kl_to_ref_coeff=0",
        "train.max_empty_collections=1000000",
        "selection.above=none",
        "selection.include_truncated=true",
        "inference_model.max_tokens=2",
        "optimizer.scheduler.enabled=false",
        "logging.progress=plain",
    ]
    if schedule is None:
        overrides.append(f"train.sync_iter={str(name == 'in turn').lower()}")
    else:
        overrides += [
            f"train.weight_update_frequency={schedule.per_publish}",
            f"train.max_policy_age={'null' if schedule.max_age is None else schedule.max_age}",
            f"train.collections_in_flight={schedule.in_flight}",
            f"train.queue_size={schedule.queue_size}",
        ]
    parts = local.build(load(overrides, config_dir=harness.ROOT / "config", config_name="ei_gsm8k"), folder / "run")
    outcome = Outcome()
    put_to_sleep(parts, stages, outcome)
    start = perf_counter()
    (sync if schedule is None else async_).run(parts)
    outcome.seconds = perf_counter() - start
    return outcome


def put_to_sleep(parts: Components, stages: Stages, outcome: Outcome) -> None:
    """Lets each stage sleep for its time. What is collected is the first collection, again and again."""
    made = parts.collector.sample()
    if len(made.samples) != KEPT:
        raise SystemExit(f"the first group kept {len(made.samples)} completions instead of {KEPT}")
    attach, step, publish = parts.collector.attach_reference, parts.trainer.step, parts.weight_sync.publish

    def sleeping_sample() -> Collection:
        with parts.engine_gate.shared():
            version = parts.engine.policy_version
            sleep(stages.generate)
        samples = tuple(replace(sample, policy_version=version) for sample in made.samples)
        return replace(made, samples=samples, policy_version=version)

    def counting_attach(collection: Collection) -> Collection:
        outcome.ages.append(parts.trainer.policy_version - collection.policy_version)
        return attach(collection)

    def sleeping_step(*arguments: Any, **options: Any) -> dict[str, float]:
        start = perf_counter()
        metrics = step(*arguments, **options)
        sleep(max(0.0, stages.train - (perf_counter() - start)))
        return metrics

    def sleeping_publish() -> None:
        start = perf_counter()
        publish()
        sleep(max(0.0, stages.publish - (perf_counter() - start)))

    for owner, verb, function in (
        (parts.collector, "sample", sleeping_sample),
        (parts.collector, "collect", lambda: counting_attach(sleeping_sample())),
        (parts.collector, "attach_reference", counting_attach),
        (parts.trainer, "step", sleeping_step),
        (parts.weight_sync, "publish", sleeping_publish),
    ):
        setattr(owner, verb, function)


def _plain(rows: dict[str, Outcome]) -> dict[str, Any]:
    return {name: asdict(outcome) for name, outcome in rows.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
