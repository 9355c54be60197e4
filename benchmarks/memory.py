#!/usr/bin/env python3
"""Resident memory over 300 iterations of the real loop with a tiny model: it has to be flat.

python -m benchmarks.memory --out memory.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np

from benchmarks import harness
from expert_iteration.config.loader import load
from expert_iteration.loops import sync
from expert_iteration.runtime import local
from tests.tiny import save_tiny_model, write_copy_task

SETTLED = 50
"""Iterations before the slope is taken: until then libraries load and malloc's heap grows to its size."""


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        bytes_after = run(Path(folder), args)
    settled = np.array(bytes_after[min(SETTLED, len(bytes_after) // 2) :])
    slope = float(np.polyfit(np.arange(len(settled)), settled, 1)[0])  # bytes per iteration
    marks = sorted({max(1, round(args.iterations * share)) for share in (0.05, 1 / 6, 1 / 3, 2 / 3, 1)})
    rows = [[f"iteration {mark}", f"{bytes_after[mark - 1] / 2**20:.1f}"] for mark in marks]
    rows.append(["slope per 100 iterations", f"{100 * slope / 2**20:.2f}"])
    print(harness.table(f"resident memory over {args.iterations} iterations", ["", "MiB"], rows))
    harness.write_json(args.out, args, {"bytes": bytes_after, "slope_bytes_per_iteration": slope})
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=300)
    return parser.parse_args(arguments)


def run(folder: Path, args: argparse.Namespace) -> list[int]:
    """Resident bytes after the collection of each iteration."""
    overrides = [
        "mode=sync",
        f"num_threads={args.threads}",
        f"env.data_path={write_copy_task(folder / 'data')}",
        f"model.name={save_tiny_model(folder / 'model')}",
        "model.chat_template=plain",
        "env.prompt_template='{question}'",
        "env.repeats=8",
        "env.test_size=8",
        "train.dialog_turns_per_batch=64",
        f"train.total_dialog_turns={64 * args.iterations}",
        "train.mixed_precision=false",
        "train.max_empty_collections=1000000",
        "train.checkpoint_frequency=null",
        "inference_model.max_tokens=8",
        "eval.at_start=false",
        "eval.at_end=false",
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
    return bytes_after


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
