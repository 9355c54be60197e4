"""Selection against hand-computed groups. Run: pytest tests/unit/test_selection.py"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage
from torchrl.data import ReplayBuffer as TorchRLReplayBuffer

from expert_iteration.selection import TopKRewardSelector, select_topk
from expert_iteration.types import Prompt, Rollout, RolloutGroup, Score, Turn

NAN = float("nan")


def group(rewards, *, truncated=(), row_id=0, epoch=0) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            turns=(Turn((1,), (2,), (-0.5,), "length" if index in truncated else "stop"),),
            text="",
            score=Score(reward),
            policy_version=0,
        )
        for index, reward in enumerate(rewards)
    )
    return RolloutGroup(Prompt(row_id, ()), epoch, rollouts)


def test_best_above_the_mean_in_order():
    # mean 0.4: 0.5, 0.9 and 0.6 qualify
    assert select_topk([0.5, 0.0, 0.9, 0.0, 0.6], 2, above="mean") == [2, 4]
    assert select_topk([0.5, 0.0, 0.9, 0.0, 0.6], 9, above="mean") == [2, 4, 0]


def test_median_and_none():
    # median of four is 0.35, of five is 0.5
    assert select_topk([0.1, 0.2, 0.5, 0.9], 4, above="median") == [3, 2]
    assert select_topk([0.1, 0.2, 0.5, 0.9, 0.5], 4, above="median") == [3]
    assert select_topk([0.1, 0.2], 4, above="none") == [1, 0]
    assert select_topk([0.1, 0.2], 4) == [1, 0]


def test_min_reward_is_inclusive():
    assert select_topk([0.2, 0.5, 0.9], 3, min_reward=0.5) == [2, 1]


def test_k_below_one_is_refused():
    with pytest.raises(ValueError, match="k=0"):
        select_topk([1.0], 0)


def test_EI_07_unscored_never_wins():
    assert set(select_topk([1.0, NAN, 0.0, 0.5], 2)) == {0, 3}
    assert select_topk([None, -1.0, -1.0], 1)[0] in (1, 2)
    assert select_topk([NAN, NAN], 1) == []
    assert select_topk([float("inf"), 1.0], 1) == [1]
    selector = TopKRewardSelector(1)
    assert selector.select(group([NAN, None])).outcome == "unscored"
    # Unscored completions are no part of the mean: (1 + 0) / 2, not (1 + 0 + 0) / 3
    assert select_topk([1.0, None, 0.4, 0.0], 4, above="mean") == [0]


def test_EI_08_groups_are_keyed_by_row_not_by_text():
    """Two rows with the same text, results interleaved: one is kept of each, judged against its own gold."""
    storage = LazyTensorStorage(10)
    buffer = TorchRLReplayBuffer(storage=storage, transform=TopKRewardSelector(1), batch_size=2)
    items = TensorDict(
        {
            "reward": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
            "row_id": torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]),
            "epoch": torch.zeros(8, dtype=torch.long),
            "position": torch.arange(8),
        },
        batch_size=[8],
    )
    buffer.extend(items)
    assert storage[:]["position"].tolist() == [0, 3]
    # A second visit is judged by its own completions alone: these are all tied.
    buffer.extend(TensorDict({**items, "reward": torch.zeros(8), "epoch": torch.ones(8, dtype=torch.long)}, [8]))
    assert len(buffer) == 2


@pytest.mark.parametrize(
    ("rewards", "kept", "outcome"),
    [
        ([1, 1, 1, 0], 2, "accepted"),
        ([1, 0, 0, 0], 1, "accepted"),
        ([1, 1, 0, 0], 2, "accepted"),
        ([1, 1, 1, 1], 0, "tied"),
        ([0, 0, 0, 0], 0, "tied"),
        ([1], 0, "tied"),
        ([], 0, "unscored"),
    ],
)
def test_EI_09_binary_rewards(rewards, kept, outcome):
    selection = TopKRewardSelector(2).select(group(rewards))
    assert (len(selection.indices), selection.outcome) == (kept, outcome)
    assert all(rewards[index] == 1 for index in selection.indices)


def test_EI_09_ties_are_broken_by_the_seed():
    def chosen(seed):
        selector = TopKRewardSelector(2, seed=seed)
        return [selector.select(group([1, 1, 1, 0], row_id=row)).indices for row in range(20)]

    assert chosen(0) == chosen(0)
    assert chosen(0) != chosen(1)
    # Over rows each winner has its chance.
    assert {index for indices in chosen(0) for index in indices} == {0, 1, 2}


def test_EI_09_equal_rewards_are_kept_when_asked_for():
    assert TopKRewardSelector(2, above="none").select(group([1, 1, 1])).outcome == "accepted"
    assert TopKRewardSelector(2, above="none", min_reward=0.5).select(group([0, 0])).outcome == "below_min_reward"


def test_a_tie_of_inexact_numbers_is_a_tie():
    # fsum([0.1] * 3) / 3 need not be 0.1; nothing may count as above its own mean.
    assert select_topk([0.1] * 3, 3, above="mean") == []
    assert math.fsum([0.1] * 10) / 10 <= 0.1
    assert select_topk([0.7] * 7, 3, above="mean") == []
    for size in range(2, 13):
        assert select_topk([0.1] * size, 3, above="mean") == [], f"{size} times 0.1"


def test_median_may_leave_nothing_though_rewards_differ():
    assert TopKRewardSelector(2, above="median").select(group([1, 1, 1, 0])).outcome == "not_above"


def test_truncated_completions_count_in_the_mean_but_are_not_kept():
    # Without the truncated 1.0 the mean would be 0.25 and 0.5 would qualify either way; with it, it is 0.5.
    selector = TopKRewardSelector(4)
    assert selector.select(group([1.0, 0.0, 0.6, 0.0], truncated=(0,))).indices == (2,)
    assert selector.select(group([1.0, 0.0, 0.2, 0.0], truncated=(0,))).outcome == "truncated"
    assert TopKRewardSelector(4, include_truncated=True).select(group([1.0, 0.0], truncated=(0,))).indices == (0,)


def test_random_takes_as_many_from_the_same_groups_whatever_the_reward():
    topk = TopKRewardSelector(2)
    control = TopKRewardSelector(2, strategy="random")
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, None]
    kept = [control.select(group(rewards, truncated=(4,), row_id=row)).indices for row in range(40)]
    assert all(len(indices) == 2 == len(set(indices)) for indices in kept)
    # Failures are drawn too; the unscored and the truncated one never.
    assert {index for indices in kept for index in indices} == {0, 1, 2, 3}
    for tied in ([1.0] * 4, [0.0] * 4):
        assert control.select(group(tied)).indices == topk.select(group(tied)).indices == ()
    assert len(control.select(group([1.0, 0.0, 0.0])).indices) == 1


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="strategy"):
        TopKRewardSelector(2, strategy="best")
    with pytest.raises(ValueError, match="max_expert"):
        TopKRewardSelector(2, max_expert=0)
    with pytest.raises(ValueError, match="above"):
        select_topk([1.0, 0.0], 1, above="max")


def with_experts(rewards, expert_rewards, **arguments) -> RolloutGroup:
    policy = group(rewards, **arguments)
    experts = tuple(replace(rollout, source="teacher") for rollout in group(expert_rewards).rollouts)
    return replace(policy, rollouts=policy.rollouts + experts)


def test_experts_stand_in_where_the_policy_fails_up_to_their_share():
    # Mean 2/6: only the experts qualify, and one of two is the most.
    selection = TopKRewardSelector(2, max_expert=1).select(with_experts([0.0, 0.0, 0.0, 0.0], [1.0, 1.0]))
    assert selection.outcome == "accepted" and len(selection.indices) == 1 and selection.indices[0] in (4, 5)
    both = TopKRewardSelector(2, max_expert=2).select(with_experts([0.0, 0.0, 0.0, 0.0], [1.0, 1.0]))
    assert set(both.indices) == {4, 5}


def test_experts_count_in_the_statistic_and_leave_their_place_to_the_policy():
    # Mean 0.58: 0.6 of the policy and the experts' 0.9, 0.8 and 0.7 qualify. Best first: 0.9, then 0.6.
    selection = TopKRewardSelector(2, max_expert=1).select(with_experts([0.6, 0.5, 0.0], [0.9, 0.8, 0.7]))
    assert selection.indices == (3, 0)
    # Mean 0.4: without the expert 0.3 would have qualified.
    assert TopKRewardSelector(2, max_expert=1).select(with_experts([0.3, 0.0], [0.9])).indices == (2,)


@pytest.mark.parametrize("epoch", range(20))
def test_ties_between_policy_and_experts_keep_the_share(epoch):
    # Mean 3/6: the policy's winner and the two experts tie, and of the experts one is the most.
    members = with_experts([1.0, 0.0, 0.0, 0.0], [1.0, 1.0], epoch=epoch)
    indices = TopKRewardSelector(2, max_expert=1).select(members).indices
    assert 0 in indices and len(indices) == 2
    # With room for one, the seed decides between all three.
    (alone,) = TopKRewardSelector(1, max_expert=1).select(members).indices
    assert alone in (0, 4, 5)
    assert TopKRewardSelector(1, max_expert=1).select(members).indices == (alone,)


def test_an_expert_that_is_not_scored_is_not_kept_and_no_part_of_the_mean():
    # Mean of 0.4 and 0: the unscored expert is not in it.
    selection = TopKRewardSelector(2, max_expert=1).select(with_experts([0.4, 0.0], [None]))
    assert selection.indices == (0,)
    assert TopKRewardSelector(2, max_expert=1).select(with_experts([1.0, 1.0], [1.0])).outcome == "tied"


@pytest.mark.parametrize("epoch", range(20))
def test_the_control_takes_no_more_experts_than_top_k_may(epoch):
    members = with_experts([0.0, 0.0, 1.0], [1.0] * 9, epoch=epoch)
    kept = TopKRewardSelector(3, max_expert=1, strategy="random", above="none").select(members).indices
    assert len(kept) == 2 or len(kept) == 3
    assert sum(index >= 3 for index in kept) <= 1
