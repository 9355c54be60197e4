"""Optimizer, learning-rate schedule and KL schedule. Both schedules are functions of the share of the run gone by."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, pi

import torch
from torch import Tensor, nn

from expert_iteration.config.schema import KLScheduleConfig, OptimizerConfig, SchedulerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters. Norms and biases (fewer than two dimensions) are not decayed."""
    trainable = list(parameters)
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, fused=True)
    raise ValueError(f"optimizer.name={config.name!r}: one of adamw")


def learning_rate(config: OptimizerConfig, progress: float, total_steps: int) -> float:
    """Learning rate when a share `progress` (in [0, 1]) of a run of `total_steps` optimizer steps lies behind."""
    if not config.scheduler.enabled:
        return config.lr
    return config.lr * schedule_factor(config.scheduler, progress * total_steps, total_steps)


def schedule_factor(config: SchedulerConfig, position: float, total_steps: int) -> float:
    """Share of the peak rate at `position` steps into a run of `total_steps`.

    The warm-up's first step has rate 1 / warmup_steps and its last one the peak, so that no step is wasted at zero.
    """
    if position < config.warmup_steps:
        return min(1.0, (position + 1) / config.warmup_steps)
    share = (position - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.type == "constant":
        return 1.0
    if config.type == "linear":
        return 1.0 - share
    if config.type == "cosine":
        return 0.5 * (1.0 + cos(2.0 * pi * config.num_cycles * share))
    raise ValueError(f"optimizer.scheduler.type={config.type!r}: one of cosine, linear, constant")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every group, in place where the optimizer keeps it as a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def kl_coefficient(start: float, schedule: KLScheduleConfig, progress: float) -> float:
    """kl_to_ref_coeff when a share `progress` (in [0, 1]) of the run lies behind."""
    if schedule.type == "constant":
        return start
    assert schedule.end_value is not None, "config checks refuse a schedule without an end value"
    if schedule.type == "linear":
        return start + (schedule.end_value - start) * progress
    if schedule.type == "cosine":
        return schedule.end_value + (start - schedule.end_value) * 0.5 * (1.0 + cos(pi * progress))
    raise ValueError(f"train.kl_to_ref_schedule.type={schedule.type!r}: one of constant, linear, cosine")


def reference_needed(loss_function: str, start: float, schedule: KLScheduleConfig) -> bool:
    """Whether any term of the run looks at the reference."""
    return loss_function == "minor_sft" or start > 0 or (schedule.end_value or 0) > 0
