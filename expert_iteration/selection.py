"""Top-k selection: which completions of a group are worth training on.

    rewards [0.0, 1.0, 0.5, 1.0], k=1, above="mean"   mean 0.625, so 1 and 3 qualify; one of them, by the seed

A group never trains on its failures just to fill k: only completions above the group's own mean (or median) qualify.
The selector keeps no state, so a later visit to the same prompt is judged by its own completions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from statistics import median
from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from expert_iteration.seeding import derive_seed
from expert_iteration.types import POLICY, Rollout, RolloutGroup

Outcome = Literal["accepted", "unscored", "tied", "below_min_reward", "truncated", "not_above"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Indices of the kept completions, best first, and what became of the group."""

    indices: tuple[int, ...]
    outcome: Outcome
    """accepted, or why nothing was kept: no completion scored, all rewards equal, none reached min_reward, all that
    qualified were truncated, or none was above the statistic though rewards differ (median only)."""


def select_topk(
    rewards: Sequence[float | None],
    k: int,
    *,
    above: str | None = None,
    min_reward: float | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Indices of the best `k` rewards that are above the group's statistic and not below `min_reward`, best first.

    `None` and NaN mean unscored: never selected and no part of the statistic. `above=None` is "none". Equal rewards
    are ordered by `generator`, or by position without one.

    >>> select_topk([1.0, float("nan"), 0.0, 0.5], 2)
    [0, 3]
    >>> select_topk([1.0, 0.0, 0.0, 0.0], 2, above="mean")
    [0]
    """
    if k < 1:
        raise ValueError(f"k={k}: select_topk keeps at least one completion")
    scored = [index for index, reward in enumerate(rewards) if is_scored(reward)]
    qualified = _above(rewards, scored, above or "none")
    if min_reward is not None:
        qualified = [index for index in qualified if rewards[index] >= min_reward]  # type: ignore[operator]
    shuffled = [qualified[i] for i in _order(len(qualified), generator)]
    return sorted(shuffled, key=lambda index: -rewards[index])[:k]  # type: ignore[operator]


def is_scored(reward: float | None) -> bool:
    """Whether a reward is a finite number."""
    return reward is not None and isfinite(reward)


def _order(count: int, generator: torch.Generator | None) -> list[int]:
    if generator is None:
        return list(range(count))
    return torch.randperm(count, generator=generator).tolist()


def _above(rewards: Sequence[float | None], scored: list[int], above: str) -> list[int]:
    """Those of `scored` whose reward is above the statistic over all of them. Exact: three times 0.1 is a tie."""
    if above == "none" or not scored:
        return scored
    exact = {index: Fraction(rewards[index]) for index in scored}  # type: ignore[arg-type]
    if above == "mean":
        bound = sum(exact.values(), Fraction(0)) / len(exact)
    elif above == "median":
        bound = median(exact.values())
    else:
        raise ValueError(f"above={above!r}: one of mean, median, none")
    return [index for index in scored if exact[index] > bound]


class TopKRewardSelector(Transform):
    """Keeps the best completions of each group.

    `select` serves the pipeline. As a torchrl transform on a replay buffer it filters what is extended: items of one
    call that share (`row_id_key`, `epoch_key`) form a group, never items that share a text, and a call carries whole
    groups. Nothing is kept between calls; `include_truncated` and `max_expert` are for `select`, since items carry no
    such marks.

    Args:
        topk_size: most completions kept per group.
        above: statistic of the group that a completion has to exceed.
        min_reward: least reward of a kept completion.
        include_truncated: whether completions cut by the length limit may be kept. They count in the statistic.
        max_expert: most completions kept per group that the policy has not sampled itself; None is no bound. They
            count in the statistic.
        strategy: "random" is the control: as many as top-k would keep, from the same groups, whatever their reward.
        seed: orders ties and draws the control, together with row id and epoch.
    """

    def __init__(
        self,
        topk_size: int,
        *,
        above: str = "mean",
        min_reward: float | None = None,
        include_truncated: bool = False,
        max_expert: int | None = None,
        strategy: str = "topk",
        seed: int = 0,
        reward_key: NestedKey = "reward",
        row_id_key: NestedKey = "row_id",
        epoch_key: NestedKey = "epoch",
    ) -> None:
        super().__init__()
        if strategy not in ("topk", "random"):
            raise ValueError(f"strategy={strategy!r}: one of topk, random")
        if max_expert is not None and max_expert < 1:
            raise ValueError(f"max_expert={max_expert}: at least 1, or None for no bound")
        self.topk_size = topk_size
        self.above: str = above
        self.min_reward = min_reward
        self.include_truncated = include_truncated
        self.max_expert = max_expert
        self.strategy = strategy
        self.seed = seed
        self.reward_key, self.row_id_key, self.epoch_key = reward_key, row_id_key, epoch_key

    def select(self, group: RolloutGroup) -> Selection:
        """Chooses among the rollouts of one group."""
        rewards = [rollout.reward for rollout in group.rollouts]
        eligible = [self._eligible(rollout) for rollout in group.rollouts]
        is_expert = [rollout.source != POLICY for rollout in group.rollouts]
        generator = self._generator(group.prompt.row_id, group.epoch)
        return self._choose(rewards, eligible, is_expert, generator)

    def _eligible(self, rollout: Rollout) -> bool:
        return self.include_truncated or not rollout.truncated

    def _generator(self, row_id: int, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, "selection", row_id, epoch))

    def _choose(
        self,
        rewards: Sequence[float | None],
        eligible: Sequence[bool],
        is_expert: Sequence[bool],
        generator: torch.Generator,
    ) -> Selection:
        # Truncated completions stay in the statistic, so the choice runs over all and drops them afterwards.
        ranked = select_topk(
            rewards, max(len(rewards), 1), above=self.above, min_reward=self.min_reward, generator=generator
        )
        kept = self._within_bounds([index for index in ranked if eligible[index]], is_expert, self.topk_size)
        if not kept:
            return Selection((), self._reason(rewards, ranked))
        if self.strategy == "random":
            pool = [i for i, reward in enumerate(rewards) if is_scored(reward) and eligible[i]]
            kept = self._within_bounds([pool[i] for i in _order(len(pool), generator)], is_expert, len(kept))
        return Selection(tuple(kept), "accepted")

    def _within_bounds(self, ranked: Sequence[int], is_expert: Sequence[bool], count: int) -> list[int]:
        """The first `count` of these indices, with at most `max_expert` of experts."""
        kept: list[int] = []
        num_expert = 0
        for index in ranked:
            num_expert += is_expert[index]
            if self.max_expert is None or not is_expert[index] or num_expert <= self.max_expert:
                kept.append(index)
        return kept[:count]

    def _reason(self, rewards: Sequence[float | None], ranked: list[int]) -> Outcome:
        if ranked:
            return "truncated"
        scored = {reward for reward in rewards if is_scored(reward)}
        if not scored:
            return "unscored"
        if len(scored) == 1 and self.above != "none":
            return "tied"
        if self.min_reward is not None and max(scored) < self.min_reward:  # type: ignore[type-var, operator]
            return "below_min_reward"
        return "not_above"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leaves what is read from the buffer as it is."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Filters what is written to the buffer: (items,) -> (kept items,), or None when nothing is kept."""
        rewards = tensordict[self.reward_key].flatten().tolist()
        keys = zip(
            tensordict[self.row_id_key].flatten().tolist(), tensordict[self.epoch_key].flatten().tolist(), strict=True
        )
        groups: dict[tuple[int, int], list[int]] = {}
        for position, key in enumerate(keys):
            groups.setdefault(key, []).append(position)
        kept: list[int] = []
        for key, positions in groups.items():
            members = [rewards[position] for position in positions]
            selection = self._choose(members, [True] * len(members), [False] * len(members), self._generator(*key))
            kept.extend(positions[index] for index in selection.indices)
        # torchrl stops writing on None; an empty batch raises instead.
        return tensordict[torch.tensor(kept)] if kept else None
