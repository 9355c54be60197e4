#!/usr/bin/env python3
"""Kills a run again and again with SIGKILL and lets it go on, then compares it with one that nobody disturbed.

Some kills come while the program starts, some between two steps, some in the middle of a save. After each one every
checkpoint on disk has to be whole. In the end weights, samples and metrics have to be those of the undisturbed run.

    python -m benchmarks.torture --kills 20
    python -m benchmarks.torture --kills 4 --tiny
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness, tiny
from expert_iteration.checkpoint import load_state
from expert_iteration.checkpoint_files import complete, damage
from expert_iteration.metrics.sinks import Record, read_records
from expert_iteration.run_folder import FINISHED_FILE

MOMENTS = ("starting", "between steps", "saving")
WEIGHTS = (1, 5, 4)
MEASURED = ("time/", "perf/", "memory/", "collector/seconds", "train/weights_changed_share")
"""Metrics that no two runs have in common, and one that after a resume in the middle of a collection compares with the
weights of the checkpoint."""
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Pace:
    """How the undisturbed run went."""

    seconds_to_first_step: float
    seconds: float
    num_steps: int

    @property
    def seconds_per_step(self) -> float:
        return (self.seconds - self.seconds_to_first_step) / self.num_steps


class Run:
    """Starts of one command line in one folder."""

    def __init__(self, overrides: list[str], folder: Path) -> None:
        script = harness.ROOT / "scripts" / "expert-iteration-sync.py"
        self.folder = folder
        self._command = [sys.executable, str(script), *overrides, f"hydra.run.dir={folder}", "resume=auto"]
        self._log = folder.with_suffix(".log")

    def start(self) -> subprocess.Popen[bytes]:
        log = self._log.open("ab")
        return subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self.folder.parent)

    def finish(self) -> None:
        self.check(self.start().wait(LIMIT_S))

    def finish_and_measure(self) -> Pace:
        start = time.monotonic()
        process = self.start()
        wait_until(process, lambda: self.num_steps() > 0)
        to_first_step = time.monotonic() - start
        self.check(process.wait(LIMIT_S))
        return Pace(to_first_step, time.monotonic() - start, self.num_steps())

    def check(self, status: int) -> None:
        """Ends the program, with the log of all starts, where one ended by itself with an error."""
        if status != 0:
            raise SystemExit(f"the run ended by itself with {status}:\n{self._log.read_text()}")

    def num_steps(self) -> int:
        log = self.folder / "metrics.jsonl"
        return log.read_bytes().count(b'"kind": "step"') if log.exists() else 0

    def is_saving(self) -> bool:
        return any(self.folder.glob("checkpoints/.checkpoint_*"))


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    with contextlib.ExitStack() as stack:
        folder = args.keep.resolve() if args.keep else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        overrides = overrides_of(args, folder)
        undisturbed, tortured = Run(overrides, folder / "undisturbed"), Run(overrides, folder / "tortured")
        pace = undisturbed.finish_and_measure()
        kills, checked = torture(tortured, args, pace)
        result = {
            "undisturbed_seconds": pace.seconds,
            "steps": undisturbed.num_steps(),
            "seconds_in_saves": seconds_in_saves(undisturbed.folder),
            "kills": dict(kills),
            "checkpoints_checked": checked,
            "bytes_of_weights_that_differ": differing_bytes(undisturbed.folder, tortured.folder),
            "differences": differences(undisturbed.folder, tortured.folder),
        }
    print(table(result))
    harness.write_json(args.out, args, result)
    return 1 if result["bytes_of_weights_that_differ"] or result["differences"] else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="fixes the moments")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="empty folder for the two runs, which stay there")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    parser.add_argument("--overrides", nargs="*", default=[], help="more overrides of config/ei_demo.yaml")
    return tiny.parse(parser, arguments, {})


def overrides_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """The demo, or a run on a tiny model, with a checkpoint after every second step."""
    common = ["train.checkpoint_frequency=2", "train.keep_checkpoints=2", "logging.progress=plain", *args.overrides]
    if not args.tiny:
        # Twice the demo's steps, so that twenty kills and a step or two between them come before the end.
        return ["--config-name", "ei_demo", "train.optim_batch_size=4", *common]
    own = [
        "num_threads=1",
        "env.repeats=16",
        "train.topk_size=4",
        "train.dialog_turns_per_batch=128",
        "train.total_dialog_turns=2048",
        "train.optim_batch_size=8",
        "train.gradient_accumulation_steps=1",
        "selection.include_truncated=true",
        "inference_model.max_tokens=2",
    ]
    return [*tiny.overrides(folder), *own, *common]


def torture(run: Run, args: argparse.Namespace, pace: Pace) -> tuple[Counter[str], int]:
    """Kills, by moment, until there were enough or the run has ended; and how many checkpoints were looked at."""
    rng = random.Random(args.seed)
    kills: Counter[str] = Counter()
    checked = 0
    while kills.total() < args.kills and not (run.folder / FINISHED_FILE).exists():
        [moment] = rng.choices(MOMENTS, WEIGHTS)
        process = run.start()
        if wait_until(process, condition(run, moment, rng, pace, args.kills)):
            os.kill(process.pid, signal.SIGKILL)
            kills[moment] += 1
            process.wait()
        else:
            run.check(process.wait())
        for checkpoint in complete(run.folder / "checkpoints"):
            if wrong := damage(checkpoint):
                raise SystemExit(f"{checkpoint}: {wrong}")
            load_state(checkpoint)
            checked += 1
    if not (run.folder / FINISHED_FILE).exists():
        run.finish()
    return kills, checked


def condition(run: Run, moment: str, rng: random.Random, pace: Pace, num_kills: int) -> Callable[[], bool]:
    """When to kill, in the measure of the undisturbed run, so that all kills come before the end on any machine."""
    if moment == "starting":
        due = time.monotonic() + rng.uniform(0, pace.seconds_to_first_step)
        return lambda: time.monotonic() > due
    # Half of its steps, as a run gets past the wanted step before it is seen there and past some saves unseen.
    wanted = run.num_steps() + rng.randint(1, max(1, pace.num_steps // (2 * num_kills)))
    if moment == "saving":
        return lambda: run.num_steps() >= wanted and run.is_saving()
    pause = rng.uniform(0, pace.seconds_per_step)

    def passed() -> bool:
        if run.num_steps() < wanted:
            return False
        time.sleep(pause)
        return True

    return passed


def wait_until(process: subprocess.Popen[bytes], is_time: Callable[[], bool]) -> bool:
    """Waits; False when the process ended before."""
    limit = time.monotonic() + LIMIT_S
    while process.poll() is None:
        if is_time():
            return process.poll() is None
        if time.monotonic() > limit:
            raise SystemExit(f"the run hangs: no kill was due within {LIMIT_S:.0f} s")
        time.sleep(0.002)
    return False


def seconds_in_saves(folder: Path) -> list[float]:
    """That the run waited for each save: the copy, and the save before where it was not done yet."""
    records = read_records(folder / "metrics.jsonl")
    return [record.values["time/checkpoint"] for record in records if "time/checkpoint" in record.values]


def differing_bytes(one: Path, other: Path) -> int:
    """Of the last saved weights."""
    first, second = (
        (complete(folder / "checkpoints")[0] / "model.safetensors").read_bytes() for folder in (one, other)
    )
    if first == second:
        return 0
    return sum(a != b for a, b in zip(first, second, strict=False)) + abs(len(first) - len(second))


def differences(one: Path, other: Path) -> list[str]:
    """Logs in which the two runs differ."""
    found = []
    if (one / "samples.jsonl").read_bytes() != (other / "samples.jsonl").read_bytes():
        found.append("samples.jsonl")
    if comparable_metrics(one) != comparable_metrics(other):
        found.append("metrics.jsonl")
    return found


def comparable_metrics(
    folder: Path, is_left_out: Callable[[str, str], bool] = lambda kind, name: name.startswith(MEASURED)
) -> list[tuple[str, dict[str, float]]]:
    """Kind and values of each line of a run's metrics, without those of which `is_left_out(kind, name)` says so."""
    records: list[Record] = read_records(folder / "metrics.jsonl")
    ordered = sorted(records, key=lambda record: record.kind == "collector")  # written from a thread of their own
    return [
        (record.kind, {name: value for name, value in record.values.items() if not is_left_out(record.kind, name)})
        for record in ordered
    ]


def table(result: dict[str, Any]) -> str:
    kills = result["kills"]
    rows = [[moment, str(kills.get(moment, 0))] for moment in MOMENTS]
    rows += [
        ["kills survived", str(sum(kills.values()))],
        ["checkpoints looked at, all whole", str(result["checkpoints_checked"])],
        ["bytes of weights that differ", str(result["bytes_of_weights_that_differ"])],
        ["logs that differ", ", ".join(result["differences"]) or "none"],
    ]
    saves = result["seconds_in_saves"]
    rows.append(["seconds that a save held the undisturbed run up", f"{median(saves):.2f}" if saves else ""])
    title = f"{result['steps']} steps, {result['undisturbed_seconds']:.0f} s undisturbed; killed while"
    return harness.table(title, ["", ""], rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
