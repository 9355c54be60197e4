"""Schedules by hand, and that they act. Run: pytest tests/unit/test_optim.py"""

from __future__ import annotations

import pytest
import torch

from expert_iteration.config.schema import KLScheduleConfig, OptimizerConfig, SchedulerConfig
from expert_iteration.optim import (
    kl_coefficient,
    learning_rate,
    make_optimizer,
    reference_needed,
    schedule_factor,
    set_learning_rate,
)


def optimizer_config(**scheduler) -> OptimizerConfig:
    settings = {"enabled": True, "type": "cosine", "warmup_steps": 2, "num_cycles": 0.5, **scheduler}
    return OptimizerConfig("adamw", lr=0.1, weight_decay=0.5, clip_grad_norm=1.0, scheduler=SchedulerConfig(**settings))


def test_warm_up_then_cosine_by_hand():
    config = optimizer_config()
    rates = [learning_rate(config, step / 6, 6) for step in range(6)]
    # 1/2, 1, then 0.5 * (1 + cos(pi * [0, 1/4, 1/2, 3/4]))
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.0853553, 0.05, 0.0146447], abs=1e-6)
    assert learning_rate(config, 1.0, 6) == pytest.approx(0.0)


def test_other_forms_by_hand():
    linear = optimizer_config(type="linear")
    assert [learning_rate(linear, step / 6, 6) for step in range(6)] == pytest.approx(
        [0.05, 0.1, 0.1, 0.075, 0.05, 0.025]
    )
    assert learning_rate(optimizer_config(type="constant"), 0.9, 6) == 0.1
    assert learning_rate(optimizer_config(enabled=False), 0.0, 6) == 0.1
    with pytest.raises(ValueError, match="type"):
        schedule_factor(SchedulerConfig(True, "step", 0, 0.5), 0, 1)


def test_kl_schedules_by_hand():
    assert kl_coefficient(1.0, KLScheduleConfig("constant", None), 0.5) == 1.0
    assert kl_coefficient(1.0, KLScheduleConfig("linear", 0.2), 0.25) == pytest.approx(0.8)
    cosine = KLScheduleConfig("cosine", 0.0)
    assert [kl_coefficient(2.0, cosine, share) for share in (0.0, 0.5, 1.0)] == pytest.approx([2.0, 1.0, 0.0])


def test_reference_is_needed_when_any_term_looks_at_it():
    constant = KLScheduleConfig("constant", None)
    assert reference_needed("sft", 0.1, constant)
    assert reference_needed("minor_sft", 0.0, constant)
    assert reference_needed("sft", 0.0, KLScheduleConfig("linear", 1.0))
    assert not reference_needed("sft", 0.0, constant)


def test_the_rate_that_is_set_is_the_rate_that_acts():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = make_optimizer([weight], optimizer_config())
    for rate in (0.1, 0.01):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        # Adam's step with a constant gradient is the rate itself; decay adds rate * 0.5 * weight.
        torch.testing.assert_close(before - weight.detach(), rate + rate * 0.5 * before, atol=1e-6, rtol=0)


def test_a_tensor_rate_is_filled_in_place():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1), fused=True)
    rate = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_vectors_are_not_decayed():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, vector], optimizer_config())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
