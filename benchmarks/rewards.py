#!/usr/bin/env python3
"""Scores per second on one core: our GSM8K reward, in process and by the verifier pool, against torchrl's.

All score the same responses to real GSM8K problems, in the form that torchrl's parser reads
(<think>...</think><answer>...</answer>; it takes no other),
in the same process. Repeats are interleaved; the table shows medians and ratios.

    taskset -c 0 python benchmarks/rewards.py --data data/gsm8k --responses 4000 --repeats 7
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from tensordict import TensorDict
from torchrl.envs.llm.reward.gsm8k import GSM8KRewardParser

from expert_iteration.tasks import make_task, make_verifier
from expert_iteration.types import Prompt


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(1)
    task = make_task("gsm8k", data_path=str(args.data), reward="graded")
    items = make_items(args.data, args.responses)
    pools = {workers: make_verifier(task, workers=workers, time_limit_s=10.0) for workers in args.workers}
    runs: dict[str, Callable[[], float]] = {
        "ours": lambda: accuracy([task.score(prompt, text).details["success"] for prompt, text in items.ours]),
        "torchrl": lambda: torchrl_accuracy(items),
        "torchrl, core alone": lambda: torchrl_core_accuracy(items),
        **{f"pool of {workers}": pool_run(pool, items) for workers, pool in pools.items()},
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    accuracies: dict[str, float] = {}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            start = perf_counter()
            accuracies[name] = run()
            if repeat > 0:  # the first of each warms up
                rates[name].append(len(items.ours) / (perf_counter() - start))
    for pool in pools.values():
        pool.close()
    medians = {name: median(values) for name, values in rates.items()}
    print(f"{len(items.ours)} responses, {len(os.sched_getaffinity(0))} core(s), {args.repeats} repeats")
    print(f"{'':22}{'scores/s':>10}{'of torchrl':>12}{'success':>10}")
    for name, rate in medians.items():
        print(f"{name:22}{rate:10.0f}{rate / medians['torchrl']:12.2f}{accuracies[name]:10.4f}")
    for workers in args.workers:
        microseconds = 1e6 * (1 / medians[f"pool of {workers}"] - 1 / medians["ours"])
        print(f"pool of {workers}: {microseconds:.0f} microseconds more for each item than in process")
    if args.out is not None:
        args.out.write_text(json.dumps({"scores_per_second": medians, "all": rates}, indent=2) + "\n")
    return 0


class Items:
    """The same responses in the form of either side."""

    def __init__(self) -> None:
        self.ours: list[tuple[Prompt, str]] = []
        self.golds: list[str] = []
        """With "#### ", as torchrl expects them."""


def make_items(data: Path, count: int) -> Items:
    """Real solutions as reasoning with a final answer: right, wrong, with separators, or missing."""
    rng = random.Random(0)
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    items = Items()
    for number in range(count):
        row = rng.choice(rows)
        solution, _, gold = row["answer"].rpartition("#### ")
        shown = {0: gold, 1: gold, 2: f"${gold}", 3: str(rng.randrange(1000)), 4: ""}[number % 5]
        items.ours.append((Prompt(number, (), gold), f"<think>{solution}</think>\n<answer>{shown}</answer>"))
        items.golds.append(f"{solution}#### {gold}")
    return items


def pool_run(pool: object, items: Items) -> Callable[[], float]:
    return lambda: accuracy([score.details["success"] for score in pool.score_many(items.ours)])  # type: ignore[attr-defined]


def torchrl_accuracy(items: Items) -> float:
    """torchrl's transform over a batch, as its environments call it."""
    parser = GSM8KRewardParser(in_keys=["text", "answer"])
    parser._input_mode = "text"
    size = len(items.golds)
    step = TensorDict({"text": [text for _, text in items.ours]}, batch_size=[size])
    following = TensorDict({"answer": items.golds}, batch_size=[size])
    result = parser._step(step, following)
    return float(result["success"].float().mean())


def torchrl_core_accuracy(items: Items) -> float:
    """torchrl's extraction and comparison alone, without the tensors that carry its results."""
    parser = GSM8KRewardParser
    successes = []
    for (_, text), gold in zip(items.ours, items.golds, strict=True):
        _, answer = parser.extract_tags(text)
        _, true = gold.split("#### ")
        successes.append(bool(answer) and parser.normalize_answer(answer) == parser.normalize_answer(true))
    return accuracy(successes)


def accuracy(successes: list[float] | list[bool]) -> float:
    return sum(map(float, successes)) / len(successes)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--responses", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
