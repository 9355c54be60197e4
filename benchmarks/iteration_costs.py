#!/usr/bin/env python3
"""What the reference and the weight sync cost, as shares of an iteration of the demo that is run beside them.

Each iteration collects, trains and publishes as the synchronous loop does, with the parts of a real run. The reference
is timed on what the iteration has kept: alone, unpacked and packed. The weight sync is timed in its parts; a publish is
all of them together, and the loop verifies once more before the next collection.

    python -m benchmarks.iteration_costs --out iteration_costs.json
    python -m benchmarks.iteration_costs --overrides train_model.lora.enabled=true optimizer.lr=1e-4
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness
from expert_iteration.components import Components
from expert_iteration.config.loader import load
from expert_iteration.engines.checksum import weights_checksum
from expert_iteration.reference import AdapterOffReference, FrozenReference
from expert_iteration.runtime import local
from expert_iteration.types import TrainingSample

SYNC_PARTS = ("cast and merge", "compare and load", "checksum sent", "checksum held")


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    overrides = ["mode=sync", f"num_threads={args.threads}", *args.overrides]
    config = load(overrides, config_dir=harness.ROOT / "config", config_name=args.config_name)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = local.build(config, Path(folder))
        result = {"matmul_flops": harness.matmul_rate(parts.trainer.policy.compute_dtype)}
        for repeat in range(args.repeats + 1):
            turn = iteration(parts) | weight_sync(parts)
            if repeat > 0:
                for name, value in turn.items():
                    seconds.setdefault(name, []).append(value)
        parts.verifier.close()
        parts.logger.close()
    result["seconds"] = {name: median(values) for name, values in seconds.items()}
    print(table(result["seconds"], args))
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--config-name", default="ei_demo")
    parser.add_argument("--overrides", nargs="*", default=[], help="keys of the config")
    return parser.parse_args(arguments)


def iteration(parts: Components) -> dict[str, float]:
    """Seconds of an iteration and of its parts; the reference alone on the samples that were kept."""
    seconds = {}
    start = perf_counter()
    collection = parts.collector.sample()
    seconds["generation, scoring, selection"] = perf_counter() - start
    start = perf_counter()
    collection = parts.collector.attach_reference(collection)
    seconds["reference"] = perf_counter() - start
    start = perf_counter()
    train(parts, collection.samples)
    seconds["training"] = perf_counter() - start
    start = perf_counter()
    parts.weight_sync.publish()
    parts.weight_sync.verify()
    seconds["publish and verify"] = perf_counter() - start
    seconds["iteration"] = sum(seconds.values())
    return seconds | reference(parts, collection.samples)


def train(parts: Components, samples: tuple[TrainingSample, ...]) -> None:
    """The epochs of one collection, an optimizer step for each batch."""
    config = parts.config.train
    parts.buffer.clear()
    parts.buffer.extend(samples)
    for _ in range(config.epochs):
        for batch in parts.buffer.epoch(config.optim_batch_size):
            parts.trainer.step([batch], progress=0.0)


def reference(parts: Components, samples: tuple[TrainingSample, ...]) -> dict[str, float]:
    """Seconds of the reference on the same samples, unpacked and packed."""
    used = parts.collector._reference
    seconds = {}
    for packed in (False, True):
        made: FrozenReference | AdapterOffReference
        if isinstance(used, FrozenReference):
            made = FrozenReference(used._model, batch_size=used._batch_size, packed=packed)
        else:
            assert isinstance(used, AdapterOffReference)
            made = AdapterOffReference(used._policy, batch_size=used._batch_size, packed=packed)
        start = perf_counter()
        made.log_probs(samples)
        seconds["reference, packed" if packed else "reference, unpacked"] = perf_counter() - start
    return seconds


def weight_sync(parts: Components) -> dict[str, float]:
    """Seconds of each part of a publish, done once more by hand."""
    engine = parts.engine
    marks = [perf_counter()]
    weights = {name: tensor.to(engine.dtype) for name, tensor in parts.trainer.policy.merged_state()}
    marks.append(perf_counter())
    engine.load_weights(weights.items(), parts.trainer.policy_version)
    marks.append(perf_counter())
    weights_checksum(weights.items())
    marks.append(perf_counter())
    engine.checksum()
    marks.append(perf_counter())
    return {name: end - start for name, start, end in zip(SYNC_PARTS, marks, marks[1:], strict=False)}


def table(seconds: dict[str, float], args: argparse.Namespace) -> str:
    rows = [[name, f"{value:.3f}", f"{value / seconds['iteration']:.1%}"] for name, value in seconds.items()]
    overrides = " ".join(args.overrides)
    title = f"{args.config_name} {overrides}".strip() + f", {args.threads} threads, median of {args.repeats}"
    return harness.table(title, ["", "s", "of an iteration"], rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
