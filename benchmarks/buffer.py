#!/usr/bin/env python3
"""Cost of the replay buffer at 1e3 to 1e6 samples: storing 64, drawing by priority, a batch of a uniform epoch.

Beside it torchrl's ReplayBuffer with the same storage and its uniform sampler, which stacks the drawn items and leaves
them so, where ours makes a padded batch. The first draw after a store sorts out the priorities of the whole buffer, and
the first batch of an epoch its order; later ones do not. Memory is what holding the samples adds to the process.

    python -m benchmarks.buffer --out buffer.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torchrl.data import LazyStackStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness, tiny
from expert_iteration.replay_buffer import ReplayBuffer, _to_tensordict
from expert_iteration.types import Batch, TrainingSample

NUM_TOKENS = 32
"""Of a sample; half of them are the response."""
STORED = 64
"""Samples that are stored at a time."""
COLUMNS = {
    "store": f"store {STORED}",
    "first_draw": "first draw",
    "draw": "later draw",
    "first_batch": "epoch's first batch",
    "batch": "later batch",
    "peer_store": "torchrl store",
    "peer_draw": "torchrl draw",
}
"""Headings of what is timed."""
TINY = {"sizes": [200, 500], "repeats": 1}


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    figures = [measure(size, args) for size in args.sizes]
    rows = [
        [
            f"{row['size']:,}",
            *(f"{1e3 * row[key]:.2f}" for key in COLUMNS),
            f"{row['bytes'] / harness.GIB:.2f}",
        ]
        for row in figures
    ]
    title = f"milliseconds; batches of {args.batch} samples of {NUM_TOKENS} tokens, median of {args.repeats}"
    print(harness.table(title, ["samples", *COLUMNS.values(), "GiB"], rows))
    harness.write_json(args.out, args, {"sizes": figures})
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--batch", type=int, default=64, help="samples of a draw, at most half of the smallest size")
    args = tiny.parse(parser, arguments, TINY)
    if min(args.sizes) < 2 * args.batch:
        parser.error(f"--sizes: {min(args.sizes)} samples are fewer than two batches of {args.batch}")
    return args


def samples(first: int, count: int) -> list[TrainingSample]:
    ids = torch.arange(NUM_TOKENS)
    log_probs = torch.where(ids >= NUM_TOKENS // 2, -1.0, float("nan"))
    return [
        TrainingSample(ids, ids >= NUM_TOKENS // 2, log_probs, None, (number % 10) / 10, 0, number, 0)
        for number in range(first, first + count)
    ]


def measure(size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of each operation on a full buffer; the first of each warms up and is not counted."""
    before = harness.resident_bytes()
    ours = ReplayBuffer(size, prioritized=True, alpha=0.7, beta=0.5, epsilon=0.01, seed=0)
    uniform = ReplayBuffer(1, prioritized=False, alpha=0.7, beta=0.5, epsilon=0.01, seed=0)
    for first in range(0, size, 1000):
        ours.extend(samples(first, min(1000, size - first)))
    held = harness.resident_bytes() - before
    # Both views and the peer look at the same samples, which so lie in memory once.
    uniform._buffer = TorchRLReplayBuffer(storage=ours._buffer._storage, generator=uniform._generator)
    peer = TorchRLReplayBuffer(storage=LazyStackStorage(size), batch_size=args.batch)
    peer._storage._storage = list(ours._buffer._storage._storage)
    seconds: dict[str, list[float]] = {key: [] for key in COLUMNS}
    for repeat in range(args.repeats + 1):
        new = samples(repeat, STORED)
        turn = {
            "store": timed(lambda new=new: ours.extend(new)),
            **timed_epoch(ours.epoch(args.batch), "first_draw", "draw"),
            **timed_epoch(uniform.epoch(args.batch), "first_batch", "batch"),
            "peer_store": timed(lambda new=new: [peer.add(_to_tensordict(sample)) for sample in new]),
            "peer_draw": timed(peer.sample),
        }
        if repeat > 0:
            for key, value in turn.items():
                seconds[key].append(value)
    return {"size": size, "bytes": held, **{key: median(values) for key, values in seconds.items()}}


def timed_epoch(batches: Iterator[Batch], first: str, later: str) -> dict[str, float]:
    """Seconds of an epoch's first two batches, by these names."""
    return {name: timed(lambda: next(batches)) for name in (first, later)}


def timed(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
