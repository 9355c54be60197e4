"""Metrics of one collection, from its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from expert_iteration.selection import is_scored
from expert_iteration.statistics import summarize
from expert_iteration.types import POLICY, Rollout, RolloutGroup

UNSCORED_REASONS = ("timed_out", "crashed", "raised", "invalid", "declined", "too_long")
"""Last names of the details that say why a response has no reward."""


def collection_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`reward/*`, `length/*` and the counts of unscored and truncated completions of all groups together.

    They describe what the policy has sampled; what came from experts is described by `expert/*`, where there is any.
    What is unscored counts whoever wrote it, since it is the verifier's doing.

    Unscored rollouts (None, NaN, infinite) count in `selection/unscored_samples` and in no reward. What cannot be said
    is left out: without any scored rollout there is no `reward/*`, without groups there is no `length/*` either.
    Accuracy and pass@N look at the scored rollouts whose task reports "success".
    """
    everything = [rollout for group in groups for rollout in group.rollouts]
    groups = [replace(group, rollouts=tuple(r for r in group.rollouts if r.source == POLICY)) for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "selection/groups": len(groups),
        "selection/unscored_samples": sum(not is_scored(rollout.reward) for rollout in everything),
        "selection/truncated_samples": sum(rollout.truncated for rollout in rollouts),
        **_reward_metrics(rollouts),
        **_success_metrics(groups),
        **_part_metrics(rollouts),
        **_unscored_reasons(everything),
        **_length_metrics(rollouts),
        **_expert_metrics([rollout for rollout in everything if rollout.source != POLICY]),
    }


def _part_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of each part of the scores over the scored rollouts that have it."""
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.score.details.items():
            if is_scored(rollout.reward) and name != "success" and not _is_reason(name):
                parts.setdefault(name, []).append(value)
    return {f"parts/{name}": summarize(values).mean for name, values in sorted(parts.items())}


def _unscored_reasons(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many rollouts are unscored for each reason."""
    reasons = Counter(
        name
        for rollout in rollouts
        if not is_scored(rollout.reward)
        for name in rollout.score.details
        if _is_reason(name)
    )
    return {f"unscored/{name}": count for name, count in sorted(reasons.items())}


def _is_reason(detail: str) -> bool:
    """Whether a detail says why something could not be scored."""
    return detail.rpartition(".")[2] in UNSCORED_REASONS


def _expert_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    metrics: dict[str, float] = {
        "expert/rollouts": len(rollouts),
        "expert/unscored_rollouts": sum(not is_scored(rollout.reward) for rollout in rollouts),
    }
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None and is_scored(rollout.reward)]
    if rewards:
        metrics["expert/reward_mean"] = summarize(rewards).mean
    return metrics


def _reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None and is_scored(rollout.reward)]
    if not rewards:
        return {}
    summary = summarize(rewards)
    return {
        "reward/mean": summary.mean,
        "reward/std": summary.std,
        "reward/min": summary.min,
        "reward/max": summary.max,
    }


def _success_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    successes = [
        [rollout.score.details["success"] for rollout in group.rollouts if _has_success(rollout)] for group in groups
    ]
    successes = [group for group in successes if group]
    if not successes:
        return {}
    flat = [success for group in successes for success in group]
    return {
        "reward/accuracy": summarize(flat).mean,
        "reward/pass_at_n": summarize([max(group) for group in successes]).mean,
    }


def _has_success(rollout: Rollout) -> bool:
    return is_scored(rollout.reward) and "success" in rollout.score.details


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    response = summarize([rollout.num_response_tokens for rollout in rollouts])
    return {
        "length/response_mean": response.mean,
        "length/response_std": response.std,
        "length/response_min": response.min,
        "length/response_max": response.max,
        "length/prompt_mean": summarize([len(rollout.turns[0].prompt_ids) for rollout in rollouts]).mean,
        "length/truncated_share": summarize([rollout.truncated for rollout in rollouts]).mean,
    }
