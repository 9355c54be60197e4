#!/usr/bin/env python3
"""Resident memory over 300 iterations of the real loop with a tiny random model: it has to be flat.

Collect, train and publish run in this one process. The slope is a least-squares line through what comes after iteration
50. The table says how often it trained and published too: an iteration that keeps nothing does neither.

    python -m benchmarks.memory --out memory.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness, tiny
from expert_iteration.config.loader import load
from expert_iteration.loops import sync
from expert_iteration.runtime import local

SETTLED = 50
"""Iterations before the slope is taken: until then libraries load and malloc's heap grows to its size."""
MARKS = (20, 50, 100, 200, 300)
"""Iterations whose memory the table shows, beside the last."""
TINY = {"iterations": 4}


@dataclass(frozen=True)
class Measured:
    """What a run used and did."""

    bytes_after: list[int]
    """Resident after the collection of each iteration."""
    optimizer_steps: int
    publishes: int


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measured = run(Path(folder), args)
    bytes_after = measured.bytes_after
    slope = slope_of(bytes_after)
    marks = sorted({mark for mark in MARKS if mark < args.iterations} | {args.iterations})
    rows = [[f"iteration {mark}", f"{bytes_after[mark - 1] / 2**20:.1f}"] for mark in marks]
    rows.append(["slope per 100 iterations", f"{100 * slope / 2**20:.2f}"])
    title = (
        f"resident memory over {args.iterations} iterations with {measured.optimizer_steps} optimizer steps and "
        f"{measured.publishes} publishes"
    )
    print(harness.table(title, ["", "MiB"], rows))
    result = {
        "bytes": bytes_after,
        "marks": {mark: bytes_after[mark - 1] for mark in marks},
        "slope_bytes_per_iteration": slope,
        "optimizer_steps": measured.optimizer_steps,
        "publishes": measured.publishes,
    }
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=300, help="at least 4")
    args = tiny.parse(parser, arguments, TINY)
    if args.iterations < 4:
        parser.error(f"--iterations {args.iterations}: a slope takes at least 4")
    return args


def slope_of(bytes_after: list[int]) -> float:
    """Bytes per iteration, by least squares after SETTLED iterations, or after half of a shorter run."""
    settled = np.array(bytes_after[min(SETTLED, len(bytes_after) // 2) :])
    return float(np.polyfit(np.arange(len(settled)), settled, 1)[0])


def run(folder: Path, args: argparse.Namespace) -> Measured:
    """The whole run, in `folder`."""
    overrides = [
        *tiny.overrides(folder),
        "mode=sync",
        f"num_threads={args.threads}",
        "env.repeats=8",
        "train.dialog_turns_per_batch=64",
        f"train.total_dialog_turns={64 * args.iterations}",
        "train.max_empty_collections=1000000",
        "inference_model.max_tokens=8",
    ]
    config = load(overrides, config_dir=harness.ROOT / "config", config_name="ei_gsm8k")
    bytes_after: list[int] = []
    with redirect_stdout(StringIO()):  # a run's own lines
        parts = local.build(config, folder / "run")
        collect = parts.collector.collect

        def counted() -> object:
            collection = collect()
            bytes_after.append(harness.resident_bytes())
            return collection

        parts.collector.collect = counted
        sync.run(parts)
    return Measured(bytes_after, parts.trainer.optimizer_steps, parts.trainer.policy_version)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
