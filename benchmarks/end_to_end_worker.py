"""One side of benchmarks/end_to_end.py, in a process of its own: an iteration for each line of stdin.

The first line is a setting as JSON, with the overrides of a run's config; each later line asks for one iteration and is
answered by a line of JSON with seconds by part, tokens, completions, samples trained on and peak memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks import harness

Iteration = Callable[[], dict[str, float]]
CONFIG_DIR = Path(__file__).parents[1] / "config"


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setting = json.loads(sys.stdin.readline())

    def answer(content: dict[str, float]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        {"ours": ours, "trl": trl}[setting["side"]](setting, Path(folder), answer)


class Clock:
    """Seconds by part of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Lets every call of a method count as a part."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)


def load_config(setting: dict[str, Any]) -> Any:
    from expert_iteration.config.loader import load

    return load(setting["overrides"], config_dir=CONFIG_DIR, config_name="ei_demo")


def ours(setting: dict[str, Any], folder: Path, answer: Callable[[dict[str, float]], None]) -> None:
    """The parts of a run, driven as the synchronous loop drives them."""
    from expert_iteration.runtime import local

    config = load_config(setting)
    parts = local.build(config, folder)
    if setting["ignore_end"]:
        parts.collector._sampling = replace(parts.collector._sampling, stop_token_ids=())
    clock = Clock()
    clock.wrap(parts.engine, "generate", "generation")
    clock.wrap(parts.trainer, "step", "training")
    answer({"ready": True})
    for _ in sys.stdin:
        harness.reset_peak()
        clock.seconds.clear()
        trained = 0
        with clock.part("total"):
            collection = parts.collector.collect()
            parts.buffer.clear()
            parts.buffer.extend(collection.samples)
            for _ in range(config.train.epochs):
                for batch in parts.buffer.epoch(config.train.optim_batch_size):
                    parts.trainer.step([batch], progress=0.0)
                    trained += batch.num_sequences
            parts.weight_sync.publish()
        answer(
            clock.seconds
            | {
                "completions": collection.dialog_turns,
                "tokens": collection.generated_tokens,
                "trained": trained,
                "peak_bytes": harness.resident_bytes("VmHWM"),
            }
        )
    parts.verifier.close()
    parts.logger.close()


class Turns(TrainerCallback):
    """Lets TRL's trainer wait for a line before each optimizer step, and answers after it."""

    def __init__(self, clock: Clock, completions: int, answer: Callable[[dict[str, float]], None]) -> None:
        self.tokens = 0
        self._clock = clock
        self._completions = completions
        self._answer = answer
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if not sys.stdin.readline():
            raise EOFError
        harness.reset_peak()
        self._clock.seconds.clear()
        self.tokens = 0
        self._start = perf_counter()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        total = perf_counter() - self._start
        self._answer(
            {
                "total": total,
                "generation": self._clock.seconds["generation"],
                "training": total - self._clock.seconds["rollout"],
                "completions": self._completions,
                "tokens": self.tokens,
                "trained": self._completions,
                "peak_bytes": harness.resident_bytes("VmHWM"),
            }
        )
        return control


def trl(setting: dict[str, Any], folder: Path, answer: Callable[[dict[str, float]], None]) -> None:
    """TRL's GRPOTrainer on the same prompts and reward; an iteration is a generation batch and its optimizer step."""
    from datasets import Dataset
    from trl import GRPOTrainer  # type: ignore[import-not-found]

    from expert_iteration.config import derived
    from expert_iteration.model_source import load_tokenizer, resolve_model
    from expert_iteration.tasks import task_of

    config = load_config(setting)
    torch.set_num_threads(config.num_threads)
    task = task_of(config)
    prompts = list(task.prompts("train"))
    by_text = {str(prompt.messages[-1]["content"]): prompt for prompt in prompts}
    turns = derived.dialog_turns_per_batch(config)

    def reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        scores = [task.score(by_text[asked[-1]["content"]], given[-1]["content"]) for asked, given in pairs]
        return [score.reward or 0.0 for score in scores]

    clock = Clock()
    callback = Turns(clock, turns, answer)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(resolve_model(config.model.name), dtype=torch.float32),
        reward_funcs=reward,
        args=grpo_config(config, setting, folder, turns),
        train_dataset=Dataset.from_list([{"prompt": [dict(message) for message in p.messages]} for p in prompts]),
        processing_class=load_tokenizer(config.model.name),
        callbacks=[callback],
    )
    clock.wrap(trainer, "_generate", "generation")
    clock.wrap(trainer, "_generate_and_score_completions", "rollout")
    single_turn = trainer._generate_single_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = single_turn(*args, **kwargs)
        callback.tokens += sum(map(len, result[0]))
        return result

    trainer._generate_single_turn = counted
    answer({"ready": True})
    with suppress(EOFError):
        trainer.train()


def grpo_config(config: Any, setting: dict[str, Any], folder: Path, turns: int) -> Any:
    """The same sizes as ours; nothing is logged or saved."""
    from trl import GRPOConfig

    max_tokens = config.inference_model.max_tokens
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=setting["micro_batch"],
        gradient_accumulation_steps=turns // setting["micro_batch"],
        num_generations=config.env.repeats,
        max_completion_length=max_tokens,
        temperature=config.inference_model.temperature,
        generation_kwargs={"min_new_tokens": max_tokens} if setting["ignore_end"] else None,
        beta=setting["beta"],
        learning_rate=config.optimizer.lr,
        optim="adamw_torch_fused",
        bf16=setting["bf16"],
        gradient_checkpointing=False,
        max_steps=10**6,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )


if __name__ == "__main__":
    main()
