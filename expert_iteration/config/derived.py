"""Numbers that follow from the config. They are computed where they are needed and stored nowhere.

Example: repeats=16, topk_size=4, dialog_turns_per_batch=256, total_dialog_turns=768, epochs=2, optim_batch_size=8 give
3 collections of 16 prompts, at most 64 samples each, 2 * ceil(64 / 8) = 16 optimizer steps each, 48 in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor
from typing import Any

from expert_iteration.config.schema import RunConfig

DEFAULT_SYNC_TURNS_PER_BATCH = 256
SLOW_SCORERS = ("codeio", "intermediate_integration", "polynomial_multiplication", "simple_integration")
"""Generators of reasoning_gym whose scorers take seconds for an answer, or do not end: codeio's computes a distance of
trees, the others simplify a formula of the model's and swallow whatever is raised meanwhile, Ctrl-C included."""


def dialog_turns_per_batch(config: RunConfig) -> int:
    """Completions per collection."""
    return config.train.dialog_turns_per_batch or DEFAULT_SYNC_TURNS_PER_BATCH


def prompts_per_collection(config: RunConfig) -> int:
    """Prompts per collection; checks.py makes sure that the division leaves no rest."""
    return dialog_turns_per_batch(config) // config.env.repeats


def num_collections(config: RunConfig) -> int:
    """Collections of the run: total_dialog_turns rounded up to whole collections."""
    return ceil(config.train.total_dialog_turns / dialog_turns_per_batch(config))


def max_kept_per_collection(config: RunConfig) -> int:
    """Samples of a collection in which every group keeps topk_size."""
    return prompts_per_collection(config) * config.train.topk_size


def max_expert_per_group(config: RunConfig) -> int | None:
    """Most samples of a group that may come from expert data; None without such data."""
    if config.env.expert_data is None:
        return None
    # A share of 0.29 of 100 is 28.999999999999996 in floating point, and means 29.
    return floor(config.env.expert_share * config.train.topk_size + 1e-9)


def buffer_size(config: RunConfig) -> int:
    """Capacity of the replay buffer in samples."""
    return config.train.buffer_size or max_kept_per_collection(config)


def micro_batches_per_step(config: RunConfig) -> int:
    """Micro-batches that one optimizer step consumes, over all training devices."""
    return config.train.gradient_accumulation_steps * config.train_model.num_devices


def optimizer_batch_size(config: RunConfig) -> int:
    """Samples that one optimizer step consumes."""
    return config.train.optim_batch_size * micro_batches_per_step(config)


def draws_from_buffer(config: RunConfig) -> bool:
    """Whether steps draw from the buffer as samples come in, instead of passing over it after each collection."""
    return config.loop == "async" and config.train.weight_update_frequency is not None


def collections_per_publish(config: RunConfig) -> int:
    """Collections that the asynchronous loop consumes between two publishes when every group keeps topk_size."""
    if config.train.weight_update_frequency is None:
        return 1
    drawn = config.train.weight_update_frequency * optimizer_batch_size(config)
    return max(1, drawn // (config.train.epochs * max_kept_per_collection(config)))


def collections_in_flight(config: RunConfig) -> int:
    """Collections that the asynchronous loop makes at a time."""
    return config.train.collections_in_flight or 1


def queue_size(config: RunConfig) -> int:
    """Finished collections that wait for the trainer."""
    return config.train.queue_size or max(1, collections_per_publish(config))


def optimizer_steps(config: RunConfig, num_samples: int) -> int:
    """Optimizer steps that `epochs` passes over `num_samples` buffered samples take; a last short step counts."""
    micro_batches = ceil(num_samples / config.train.optim_batch_size)
    return config.train.epochs * ceil(micro_batches / micro_batches_per_step(config))


def planned_steps(config: RunConfig, collection: int) -> int:
    """Optimizer steps of a collection (0-based) when every group keeps topk_size: the most it can take."""
    held = max_kept_per_collection(config)
    if not config.train.empty_replay_buffer:
        held *= collection + 1
    return optimizer_steps(config, min(held, buffer_size(config)))


def total_planned_steps(config: RunConfig) -> int:
    """Length of the learning-rate and KL schedules in optimizer steps."""
    total = num_collections(config)
    if draws_from_buffer(config):
        return max(1, total * max_kept_per_collection(config) * config.train.epochs // optimizer_batch_size(config))
    # From some collection on the buffer is full, and all later ones take as many steps.
    growing = 0 if config.train.empty_replay_buffer else buffer_size(config) // max_kept_per_collection(config)
    growing = min(growing, total)
    return sum(planned_steps(config, index) for index in range(growing)) + (total - growing) * planned_steps(
        config, growing
    )


def experiment_name(config: RunConfig) -> str:
    """Name of the run: logging.experiment_name, or task and model."""
    if config.logging.experiment_name is not None:
        return config.logging.experiment_name
    model = config.model.name.rstrip("/").rpartition("/")[2].removeprefix("package:")
    return f"{config.env.dataset}-{model}"


def verifier_workers(config: RunConfig) -> int:
    """Processes that score; tasks whose scoring may hang or runs the user's code get some of their own."""
    if config.env.verifier_workers is not None:
        return config.env.verifier_workers
    elif config.env.dataset in ("gsm8k", "countdown"):
        return 0
    elif config.env.dataset == "reasoning_gym":
        return 2 if _names_slow_scorer(config.env.options) else 0
    else:
        return 2


def _names_slow_scorer(options: Any) -> bool:
    """Whether a generator of SLOW_SCORERS is named anywhere: alone, in a mix, or in a `composite`."""
    if isinstance(options, Mapping):
        return any(_names_slow_scorer(value) for value in options.values())
    elif isinstance(options, list | tuple):
        return any(map(_names_slow_scorer, options))
    else:
        return options in SLOW_SCORERS
