#!/usr/bin/env python3
"""Completions per second of a whole iteration: ours against TRL's GRPOTrainer.

Both sample the same number of completions for each prompt from the same weights, in the same dtype, score them with the
same reward, train and go on with the new weights. Ours trains on the best k of N with SFT + KL, TRL on all N, which is
part of what is compared: the table has generation, training, the rest and the total apart, and samples trained on. TRL
gets the whole generation batch at once, fused AdamW and SDPA; `--micro-batch` is its largest training batch that is
fast. Sides run in processes of their own and take turns; medians are compared.

In the first table all completions have the same length, the end token being ignored; in the second the model ends them.
The peer needs the extra: pip install -c constraints.txt -e '.[benchmark]'

    python -m benchmarks.end_to_end --out end_to_end.json
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness
from expert_iteration.errors import EXIT_USER_ERROR

WORKER = Path(__file__).with_name("end_to_end_worker.py")
PARTS = ("generation", "training", "other", "total")


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if importlib.util.find_spec("trl") is None:
        print("trl is not installed: pip install -c constraints.txt -e '.[benchmark]'", file=sys.stderr)
        return EXIT_USER_ERROR
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"matmul_flops": harness.matmul_rate(getattr(torch, args.dtype)), "tables": {}}
    for lengths in args.lengths:
        result["tables"][lengths] = figures = measure(args, ignore_end=lengths == "fixed")
        print(table(lengths, figures, result["matmul_flops"], args), end="\n\n", flush=True)
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16, help="completions for each prompt")
    parser.add_argument("--topk", type=int, default=3, help="completions of a prompt that ours trains on")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=16, help="of TRL's training, in completions")
    parser.add_argument("--kl", type=float, default=0.1, help="coefficient of the KL to the reference, on both sides")
    parser.add_argument("--lengths", nargs="+", default=["fixed", "natural"], choices=("fixed", "natural"))
    parser.add_argument("--overrides", nargs="*", default=[], help="more keys of the config, for both sides")
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace, *, ignore_end: bool) -> dict[str, dict[str, float]]:
    """Medians of each side; the sides take turns."""
    bf16 = args.dtype == "bfloat16"
    setting = {
        "overrides": [
            "mode=sync",
            f"num_threads={args.threads}",
            f"train.mixed_precision={str(bf16).lower()}",
            f"train_model.torch_dtype={args.dtype}",
            f"inference_model.torch_dtype={args.dtype}",
            f"ref_model.torch_dtype={args.dtype}",
            "env.reward=graded",
            f"env.repeats={args.samples}",
            f"train.topk_size={args.topk}",
            f"train.dialog_turns_per_batch={args.prompts * args.samples}",
            f"inference_model.max_tokens={args.max_tokens}",
            "selection.include_truncated=true",
            "selection.above=none",
            "train.epochs=1",
            f"train.kl_to_ref_coeff={args.kl}",
            *args.overrides,
        ],
        "ignore_end": ignore_end,
        "micro_batch": args.micro_batch,
        "beta": args.kl,
        "bf16": bf16,
    }
    sides = {name: harness.Side(name, WORKER, setting | {"side": name}) for name in ("ours", "trl")}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 1):
        for name, side in sides.items():
            turn = side.ask({"repeat": repeat})
            if repeat > 0:  # the first warms up
                turns[name].append(turn)
    for side in sides.values():
        side.close()
    figures = {}
    for name, of_side in turns.items():
        for turn in of_side:
            turn["other"] = turn["total"] - turn["generation"] - turn["training"]
        figures[name] = {key: median(turn[key] for turn in of_side) for key in of_side[0]}
    return figures


def table(lengths: str, figures: dict[str, dict[str, float]], matmul_flops: float, args: argparse.Namespace) -> str:
    rates = {name: row["completions"] / row["total"] for name, row in figures.items()}
    rows = [
        [
            name,
            *(f"{row[part]:.1f}" for part in PARTS),
            f"{rates[name]:.2f}",
            f"{rates[name] / rates['trl']:.1f}",
            f"{row['tokens'] / row['generation']:.0f}",
            f"{row['trained']:.0f}",
            f"{row['peak_bytes'] / harness.GIB:.2f}",
        ]
        for name, row in figures.items()
    ]
    title = (
        f"{lengths} lengths: {args.prompts} prompts x {args.samples} samples x at most {args.max_tokens} tokens, "
        f"{args.dtype}, {args.threads} threads, median of {args.repeats}; a large matrix product runs at "
        f"{matmul_flops / 1e9:.0f} GFLOP/s"
    )
    header = [
        "side",
        *(f"{part} s" for part in PARTS),
        "completions/s",
        "of trl",
        "generated tokens/s",
        "trained on",
        "peak GiB",
    ]
    return harness.table(title, header, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
