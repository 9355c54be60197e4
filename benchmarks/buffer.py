#!/usr/bin/env python3
"""Cost of the replay buffer at 1e3 to 1e6 samples: storing, the first draw after it, later draws, a permutation.

Beside it torchrl's ReplayBuffer with the same storage and its uniform sampler.

    python -m benchmarks.buffer --out buffer.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torchrl.data import LazyStackStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer

from benchmarks import harness
from expert_iteration.replay_buffer import ReplayBuffer, _to_tensordict
from expert_iteration.types import Batch, TrainingSample

NUM_TOKENS = 32
STORED = 64
"""Samples that are stored at a time."""
BATCH = 8


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    figures = [measure(size, args.repeats) for size in args.sizes]
    header = [
        "samples",
        "store 64",
        "first draw",
        "later draw",
        "epoch's batch",
        "torchrl store",
        "torchrl draw",
        "GiB",
    ]
    rows = [
        [
            f"{row['size']:,}",
            *(f"{1e3 * row[key]:.2f}" for key in ("store", "first_draw", "draw", "epoch", "peer_store", "peer_draw")),
            f"{row['bytes'] / harness.GIB:.2f}",
        ]
        for row in figures
    ]
    print(harness.table(f"milliseconds; batches of {BATCH} samples of {NUM_TOKENS} tokens", header, rows))
    harness.write_json(args.out, args, {"sizes": figures})
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    return parser.parse_args(arguments)


def samples(first: int, count: int) -> list[TrainingSample]:
    ids = torch.arange(NUM_TOKENS)
    log_probs = torch.where(ids >= NUM_TOKENS // 2, -1.0, float("nan"))
    return [
        TrainingSample(ids, ids >= NUM_TOKENS // 2, log_probs, None, (number % 10) / 10, 0, number, 0)
        for number in range(first, first + count)
    ]


def measure(size: int, repeats: int) -> dict[str, Any]:
    """Median seconds of each operation on a full buffer."""
    before = harness.resident_bytes()
    ours = ReplayBuffer(size, prioritized=True, alpha=0.7, beta=0.5, epsilon=0.01, seed=0)
    uniform = ReplayBuffer(1, prioritized=False, alpha=0.7, beta=0.5, epsilon=0.01, seed=0)
    for first in range(0, size, 1000):
        ours.extend(samples(first, min(1000, size - first)))
    held = harness.resident_bytes() - before
    # Both views and the peer look at the same samples, which so lie in memory once.
    uniform._buffer = TorchRLReplayBuffer(storage=ours._buffer._storage, generator=uniform._generator)
    peer = TorchRLReplayBuffer(storage=LazyStackStorage(size), batch_size=BATCH)
    peer._storage._storage = list(ours._buffer._storage._storage)
    seconds: dict[str, list[float]] = {
        key: [] for key in ("store", "first_draw", "draw", "epoch", "peer_store", "peer_draw")
    }
    for repeat in range(repeats):
        new = samples(repeat, STORED)
        timed(seconds["store"], lambda new=new: ours.extend(new))
        batches: Iterator[Batch] = ours.epoch(BATCH)
        timed(seconds["first_draw"], lambda batches=batches: next(batches))
        timed(seconds["draw"], lambda batches=batches: next(batches))
        batches = uniform.epoch(BATCH)
        timed(seconds["epoch"], lambda batches=batches: next(batches))
        timed(seconds["peer_store"], lambda new=new: [peer.add(_to_tensordict(sample)) for sample in new])
        timed(seconds["peer_draw"], peer.sample)
    return {"size": size, "bytes": held, **{key: median(values) for key, values in seconds.items()}}


def timed(seconds: list[float], run: Any) -> None:
    start = perf_counter()
    run()
    seconds.append(perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
