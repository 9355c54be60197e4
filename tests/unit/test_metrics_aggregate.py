"""Metrics of a collection against values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from math import nan, sqrt

import pytest
import torch

from expert_iteration.metrics.aggregate import collection_metrics
from expert_iteration.metrics.glossary import check_names
from expert_iteration.metrics.memory import peak_memory_gib
from expert_iteration.types import FinishReason, Prompt, Rollout, RolloutGroup, Score, Turn


def rollout(
    reward: float | None,
    *,
    success: float | None = None,
    prompt_length: int = 3,
    length: int = 2,
    finish_reason: FinishReason = "stop",
) -> Rollout:
    turn = Turn(tuple(range(prompt_length)), tuple(range(length)), (-0.5,) * length, finish_reason)
    details = {} if success is None else {"success": success}
    return Rollout((turn,), "text", Score(reward, details), policy_version=0)


def group(*rollouts: Rollout, row_id: int = 0) -> RolloutGroup:
    return RolloutGroup(Prompt(row_id, ({"role": "user", "content": "?"},)), 0, rollouts)


def test_rewards_accuracy_and_pass_at_n_by_hand() -> None:
    groups = [
        group(rollout(1.0, success=1), rollout(0.5, success=0)),
        group(rollout(0.0, success=0), rollout(0.5, success=0), row_id=1),
    ]
    metrics = collection_metrics(groups)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(sqrt(0.125))  # (0.25 + 0 + 0.25 + 0) / 4
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/accuracy"] == 0.25
    assert metrics["reward/pass_at_n"] == 0.5
    assert metrics["selection/groups"] == 2
    assert metrics["selection/unscored_samples"] == 0
    check_names(metrics)


def test_lengths_by_hand() -> None:
    metrics = collection_metrics(
        [
            group(rollout(1.0, length=1, prompt_length=2), rollout(1.0, length=5, prompt_length=2)),
            group(rollout(None, length=3, prompt_length=6, finish_reason="length"), row_id=1),
        ]
    )
    assert metrics["length/response_mean"] == 3.0
    assert metrics["length/response_std"] == pytest.approx(sqrt(8 / 3))
    assert (metrics["length/response_min"], metrics["length/response_max"]) == (1, 5)
    assert metrics["length/prompt_mean"] == pytest.approx(10 / 3)
    assert metrics["length/truncated_share"] == pytest.approx(1 / 3)
    assert metrics["selection/truncated_samples"] == 1


def test_EI_07_unscored_rollouts_are_counted_and_enter_no_reward() -> None:
    metrics = collection_metrics(
        [
            group(rollout(1.0, success=1), rollout(nan, success=0)),
            group(rollout(None, success=1), rollout(None), row_id=1),
        ]
    )
    assert metrics["reward/mean"] == metrics["reward/min"] == 1.0
    assert metrics["reward/std"] == 0.0
    assert metrics["reward/accuracy"] == 1.0
    assert metrics["reward/pass_at_n"] == 1.0  # the second group has no scored rollout and does not count as a failure
    assert metrics["selection/unscored_samples"] == 3


def test_a_collection_without_scores_has_no_rewards_rather_than_nan() -> None:
    metrics = collection_metrics([group(rollout(None), rollout(nan))])
    assert not [name for name in metrics if name.startswith("reward/")]
    assert metrics["selection/unscored_samples"] == 2
    assert metrics["length/response_mean"] == 2.0


def test_no_groups_at_all() -> None:
    assert collection_metrics([]) == {
        "selection/groups": 0,
        "selection/unscored_samples": 0,
        "selection/truncated_samples": 0,
    }


def test_a_task_without_success_has_rewards_but_no_accuracy() -> None:
    metrics = collection_metrics([group(rollout(0.25))])
    assert metrics["reward/mean"] == 0.25
    assert "reward/accuracy" not in metrics and "reward/pass_at_n" not in metrics


def test_peak_memory_of_a_cpu_process_is_in_gib_and_never_falls() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    assert 0.02 < before < 64  # a process that has loaded torch
    block = torch.ones(2**26)  # 0.25 GiB, touched
    grown = peak_memory_gib(torch.device("cpu"))
    del block
    assert grown >= before
    assert peak_memory_gib(torch.device("cpu")) >= grown


def test_experts_are_described_apart_from_the_policy() -> None:
    own = [rollout(1.0, success=1, length=4), rollout(0.0, success=0, length=2)]
    experts = [replace(rollout(0.5, success=1, length=9), source="teacher"), replace(rollout(None), source="teacher")]
    experts.append(replace(rollout(None), score=Score(None, {"timed_out": 1.0}), source="teacher"))
    metrics = collection_metrics([group(*own, *experts)])
    alone = collection_metrics([group(*own)])
    # What is unscored counts whoever wrote it.
    expected = alone | {"selection/unscored_samples": 2, "unscored/timed_out": 1}
    assert {name: value for name, value in metrics.items() if not name.startswith("expert/")} == expected
    assert metrics["expert/rollouts"] == 3
    assert metrics["expert/unscored_rollouts"] == 2
    assert metrics["expert/reward_mean"] == 0.5
    check_names(metrics)


def test_parts_and_reasons_by_hand() -> None:
    def scored(reward: float | None, **details: float) -> Rollout:
        turn = Turn((1,), (2,), (-0.5,), "stop")
        names = {name.replace("_dot_", "."): value for name, value in details.items()}
        return Rollout((turn,), "", Score(reward, names), policy_version=0)

    metrics = collection_metrics(
        [
            group(scored(1.0, success=1, format=1.0, short=0.25), scored(0.5, success=0, format=0.0)),
            group(scored(None, success=0, format=1.0, judge_dot_raised=1.0), scored(None, timed_out=1.0), row_id=1),
        ]
    )
    parts = {name: value for name, value in metrics.items() if name.startswith(("parts/", "unscored/"))}
    assert parts == {"parts/format": 0.5, "parts/short": 0.25, "unscored/judge.raised": 1, "unscored/timed_out": 1}
    check_names(metrics)
