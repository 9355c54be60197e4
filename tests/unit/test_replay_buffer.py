from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import LazyTensorStorage
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLReplayBuffer

from expert_iteration.replay_buffer import (
    PrioritizedSampler,
    ReplayBuffer,
    collate,
    importance_weights,
    sampling_probabilities,
)
from expert_iteration.types import TrainingSample

REWARDS = torch.tensor([0.0, 0.5, 1.0])


def make_sample(
    row_id: int, reward: float = 1.0, version: int = 0, prompt: int = 2, response: int = 2
) -> TrainingSample:
    length = prompt + response
    loss_mask = torch.arange(length) >= prompt
    return TrainingSample(
        token_ids=torch.arange(1, length + 1) + 100 * row_id,
        loss_mask=loss_mask,
        engine_log_probs=torch.where(loss_mask, -0.5, math.nan),
        ref_log_probs=torch.where(loss_mask, -0.25, 0.0),
        reward=reward,
        policy_version=version,
        row_id=row_id,
        epoch=0,
    )


def make_buffer(capacity: int, prioritized: bool = False, beta: float = 0.0, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(capacity, prioritized=prioritized, alpha=1.0, beta=beta, epsilon=0.01, seed=seed)


def row_ids(buffer: ReplayBuffer, batch_size: int = 2) -> list[int]:
    return [row for batch in buffer.epoch(batch_size) for row in batch.row_ids.tolist()]


@pytest.mark.parametrize(
    ("alpha", "priorities"),
    [(0.0, [1.0, 1.0, 1.0]), (1.0, [0.01, 0.51, 1.01]), (2.0, [0.0001, 0.2601, 1.0201])],
)
def test_probabilities_by_hand(alpha: float, priorities: list[float]) -> None:
    expected = torch.tensor(priorities, dtype=torch.float64) / sum(priorities)
    torch.testing.assert_close(sampling_probabilities(REWARDS, alpha, 0.01), expected)


def test_probabilities_depend_on_the_distance_from_the_minimum_alone() -> None:
    torch.testing.assert_close(
        sampling_probabilities(REWARDS - 7.0, 1.0, 0.01), sampling_probabilities(REWARDS, 1.0, 0.01)
    )


def test_equal_rewards_are_drawn_uniformly() -> None:
    assert sampling_probabilities(torch.full((4,), 0.3), 0.7, 0.01).tolist() == [0.25] * 4


def test_a_single_sample_is_always_drawn() -> None:
    assert sampling_probabilities(torch.tensor([0.0]), 0.7, 0.01).tolist() == [1.0]
    buffer = make_buffer(4, prioritized=True, beta=1.0)
    buffer.extend([make_sample(3)])
    (batch,) = buffer.epoch(2)
    assert batch.row_ids.tolist() == [3]
    assert batch.importance_weights.tolist() == [1.0]


def test_a_large_alpha_does_not_overflow() -> None:
    probabilities = sampling_probabilities(torch.tensor([0.0, 1000.0]), 500.0, 0.01)
    assert probabilities.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        sampling_probabilities(torch.tensor([0.0, reward]), 1.0, 0.01)
    buffer = make_buffer(4)
    with pytest.raises(ValueError, match="row 9"):
        buffer.extend([make_sample(1), make_sample(9, reward=reward)])
    assert len(buffer) == 0


def test_importance_weights_by_hand() -> None:
    # Priorities 0.01, 0.51, 1.01: weights relative to the rarest are 1, 1/51, 1/101.
    torch.testing.assert_close(
        importance_weights(REWARDS, 1.0, 1.0, 0.01), torch.tensor([1.0, 1 / 51, 1 / 101], dtype=torch.float64)
    )
    torch.testing.assert_close(
        importance_weights(REWARDS, 1.0, 0.5, 0.01), torch.tensor([1.0, 51**-0.5, 101**-0.5], dtype=torch.float64)
    )
    assert importance_weights(REWARDS, 1.0, 0.0, 0.01).tolist() == [1.0, 1.0, 1.0]


def test_importance_weights_are_the_inverse_of_n_p_over_the_largest() -> None:
    rewards, alpha, beta = torch.tensor([0.1, 0.4, 0.4, 0.9, 2.0]), 0.7, 0.4
    weights = (1 / (5 * sampling_probabilities(rewards, alpha, 0.01))) ** beta
    torch.testing.assert_close(importance_weights(rewards, alpha, beta, 0.01), weights / weights.max())


def test_beta_one_cancels_the_preference_in_expectation() -> None:
    """sum_i p_i w_i f_i is the plain sum of f, up to one factor for all f."""
    weighted = sampling_probabilities(REWARDS, 0.7, 0.01) * importance_weights(REWARDS, 0.7, 1.0, 0.01)
    torch.testing.assert_close(weighted, weighted[0].expand(3))


def test_EI_01_prioritized_sampling_needs_no_extension_and_draws_by_priority() -> None:
    buffer = TorchRLReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, epsilon=0.01),
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(TensorDict({"reward": REWARDS}, batch_size=[3]))
    num_draws = 20_000
    drawn, info = buffer.sample(num_draws, return_info=True)
    frequencies = torch.bincount(info["index"], minlength=3) / num_draws
    # Four standard deviations of a frequency are at most 4 * sqrt(0.25 / 20000) = 0.0141.
    torch.testing.assert_close(
        frequencies.double(), torch.tensor([0.01, 0.51, 1.01], dtype=torch.float64) / 1.53, atol=0.0142, rtol=0
    )
    assert drawn["reward"].tolist() == REWARDS[info["index"]].tolist()
    torch.testing.assert_close(info["importance_weights"], torch.tensor([1.0, 1 / 51, 1 / 101])[info["index"]])


def test_draws_follow_what_the_buffer_holds_now() -> None:
    buffer = make_buffer(4, prioritized=True)
    buffer.extend([make_sample(0, reward=0.0)])
    assert row_ids(buffer) == [0]
    buffer.extend([make_sample(1, reward=1e9)])
    assert row_ids(buffer) == [1, 1]
    buffer.clear()
    buffer.extend([make_sample(2), make_sample(3)])
    assert set(row_ids(buffer)) <= {2, 3}


def test_draws_follow_each_sample_that_was_replaced() -> None:
    """A sampler that reads new rewards only draws as one that reads all of them anew."""
    kept, rng = make_buffer(5, prioritized=True, beta=1.0), torch.Generator().manual_seed(3)
    rewards = torch.rand(40, generator=rng).tolist()
    for count in range(1, 41):
        kept.extend([make_sample(count, reward=rewards[count - 1])])
        if count % 3 == 0:
            anew = make_buffer(5, prioritized=True, beta=1.0)
            anew.load_state_dict(kept.state_dict())
            mine, theirs = list(kept.epoch(8)), list(anew.epoch(8))
            for one, other in zip(mine, theirs, strict=True):
                assert one.row_ids.tolist() == other.row_ids.tolist()
                assert one.importance_weights.tolist() == other.importance_weights.tolist()


def test_shuffled_groups_keep_the_samples_of_a_visit_together() -> None:
    buffer = ReplayBuffer(32, prioritized=False, alpha=1.0, beta=0.0, epsilon=0.01, seed=0, shuffle="groups")
    # Rows 0 to 3 with three samples each, stored in turns, and a second visit to row 0.
    samples = [make_sample(row) for _ in range(3) for row in range(4)]
    buffer.extend([*samples, *(replace(make_sample(0), epoch=1) for _ in range(3))])
    orders = [[batch.row_ids.tolist() for batch in buffer.epoch(3)] for _ in range(4)]
    for order in orders:
        assert all(len(set(batch)) == 1 for batch in order)
        assert sorted(row for batch in order for row in batch) == [0] * 6 + [1] * 3 + [2] * 3 + [3] * 3
    assert len({str(order) for order in orders}) > 1


def test_writing_in_the_middle_of_a_pass_is_an_error() -> None:
    buffer = make_buffer(4)
    buffer.extend([make_sample(row) for row in range(4)])
    batches = buffer.epoch(2)
    next(batches)
    buffer.extend([make_sample(9)])
    with pytest.raises(RuntimeError, match="in the middle of a pass"):
        next(batches)


@pytest.mark.parametrize("prioritized", [False, True])
def test_an_epoch_has_ceil_size_over_batch_size_micro_batches(prioritized: bool) -> None:
    buffer = make_buffer(8, prioritized=prioritized)
    assert list(buffer.epoch(2)) == []
    buffer.extend([make_sample(row) for row in range(5)])
    assert [batch.num_sequences for batch in buffer.epoch(2)] == [2, 2, 1]
    assert [batch.num_sequences for batch in buffer.epoch(8)] == [5]


def test_an_epoch_visits_each_sample_once_in_a_new_order() -> None:
    buffer = make_buffer(32)
    buffer.extend([make_sample(row) for row in range(20)])
    first, second = row_ids(buffer, 3), row_ids(buffer, 3)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_an_epoch_left_early_does_not_change_what_the_next_one_visits() -> None:
    buffer = make_buffer(8)
    buffer.extend([make_sample(row) for row in range(6)])
    next(buffer.epoch(2))
    assert sorted(row_ids(buffer)) == list(range(6))


@pytest.mark.parametrize("prioritized", [False, True])
def test_same_seed_same_order(prioritized: bool) -> None:
    orders = []
    for seed in (1, 1, 2):
        buffer = make_buffer(32, prioritized=prioritized, seed=seed)
        buffer.extend([make_sample(row, reward=row / 20) for row in range(20)])
        orders.append(row_ids(buffer, 4))
    assert orders[0] == orders[1] != orders[2]


def test_a_full_buffer_replaces_the_oldest() -> None:
    buffer = make_buffer(3)
    assert buffer.extend([make_sample(row) for row in range(2)]) == 2
    assert buffer.extend([make_sample(row) for row in range(2, 7)]) == 5
    assert len(buffer) == 3
    assert sorted(row_ids(buffer)) == [4, 5, 6]
    assert buffer.extend([]) == 0
    assert sorted(row_ids(buffer)) == [4, 5, 6]
    buffer.clear()
    assert len(buffer) == 0


def test_eviction_drops_old_versions_and_keeps_the_order_of_replacement() -> None:
    buffer = make_buffer(4)
    assert buffer.evict_older_than(1) == 0
    # Slots after the wrap: row 4 (version 4), 1, 2, 3. Row 1 is the oldest.
    buffer.extend([make_sample(row, version=version) for row, version in enumerate([0, 3, 1, 3, 4])])
    assert buffer.evict_older_than(1) == 0
    assert buffer.evict_older_than(3) == 1
    assert sorted(row_ids(buffer)) == [1, 3, 4]
    buffer.extend([make_sample(5, version=5), make_sample(6, version=5)])
    assert sorted(row_ids(buffer)) == [3, 4, 5, 6]
    assert buffer.evict_older_than(9) == 4
    assert len(buffer) == 0


def test_eviction_changes_the_minimum_that_priorities_refer_to() -> None:
    buffer = make_buffer(4, prioritized=True, beta=1.0)
    buffer.extend([make_sample(0, reward=0.0, version=0), make_sample(1, reward=1.0, version=1)])
    buffer.evict_older_than(1)
    (batch,) = buffer.epoch(4)
    assert batch.row_ids.tolist() == [1]
    assert batch.importance_weights.tolist() == [1.0]


def test_stats_by_hand() -> None:
    buffer = make_buffer(4)
    assert buffer.stats() == {"size": 0}
    buffer.extend([make_sample(0, reward=0.0, response=1), make_sample(1, reward=1.0, response=4)])
    assert buffer.stats() == {
        "size": 2,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "response_tokens_mean": 2.5,
        "response_tokens_min": 1.0,
        "response_tokens_max": 4.0,
    }


def test_EI_45_stored_samples_are_copies_without_a_graph() -> None:
    sample = make_sample(1)
    log_probs = sample.engine_log_probs.clone().requires_grad_() * 2
    sample = replace(sample, engine_log_probs=log_probs, ref_log_probs=log_probs * 2)
    buffer = make_buffer(2)
    buffer.extend([sample])
    sample.token_ids.zero_()
    (batch,) = buffer.epoch(1)
    assert batch.token_ids.tolist() == [[101, 102, 103, 104]]
    assert batch.ref_log_probs is not None
    assert batch.engine_log_probs.grad_fn is None
    assert batch.ref_log_probs.grad_fn is None


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_saved_buffer_continues_with_the_same_draws(prioritized: bool, tmp_path: Path) -> None:
    buffer = make_buffer(4, prioritized=prioritized, beta=0.5)
    buffer.extend([make_sample(row, reward=row / 6, response=1 + row) for row in range(6)])
    row_ids(buffer)
    torch.save(buffer.state_dict(), tmp_path / "buffer.pt")

    restored = make_buffer(4, prioritized=prioritized, beta=0.5, seed=99)
    restored.load_state_dict(torch.load(tmp_path / "buffer.pt", weights_only=True))
    assert restored.stats() == buffer.stats()
    for _ in range(2):
        for mine, theirs in zip(buffer.epoch(3), restored.epoch(3), strict=True):
            assert mine.row_ids.tolist() == theirs.row_ids.tolist()
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert mine.importance_weights.tolist() == theirs.importance_weights.tolist()
        # The ring goes on at the same slot: the oldest sample is the next to go in both.
        for each in (buffer, restored):
            each.extend([make_sample(7, reward=0.5)])


def test_collate_pads_on_the_right() -> None:
    batch = collate([make_sample(1, prompt=1, response=2, reward=0.5, version=4), make_sample(2, prompt=2, response=2)])
    assert batch.token_ids.tolist() == [[101, 102, 103, 0], [201, 202, 203, 204]]
    assert batch.attention_mask.tolist() == [[True, True, True, False], [True] * 4]
    assert batch.loss_mask.tolist() == [[False, True, True, False], [False, False, True, True]]
    assert batch.engine_log_probs.isnan().tolist() == [[True, False, False, True], [True, True, False, False]]
    assert batch.ref_log_probs is not None
    assert batch.ref_log_probs.tolist() == [[0.0, -0.25, -0.25, 0.0], [0.0, 0.0, -0.25, -0.25]]
    assert batch.rewards.tolist() == [0.5, 1.0]
    assert batch.importance_weights.tolist() == [1.0, 1.0]
    assert batch.policy_versions.tolist() == [4, 0]
    assert batch.row_ids.tolist() == [1, 2]
    dtypes = (batch.token_ids.dtype, batch.loss_mask.dtype, batch.attention_mask.dtype, batch.rewards.dtype)
    assert dtypes == (torch.int64, torch.bool, torch.bool, torch.float32)


def test_EI_12_masks_follow_from_lengths_when_padding_equals_the_end_token() -> None:
    """The end token has id 0 here, the id that padding uses."""
    short = replace(make_sample(1), token_ids=torch.tensor([0, 5, 36, 0]))
    batch = collate([short, make_sample(2, response=4)])
    assert batch.token_ids[0].tolist() == [0, 5, 36, 0, 0, 0]
    assert batch.attention_mask[0].tolist() == [True, True, True, True, False, False]
    assert batch.loss_mask[0].tolist() == [False, False, True, True, False, False]


def test_EI_13_a_sample_without_response_is_refused_by_name() -> None:
    empty = replace(make_sample(17), loss_mask=torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="row 17, epoch 0"):
        collate([make_sample(1), empty])


def test_reference_log_probs_are_there_for_all_or_for_none() -> None:
    without = replace(make_sample(5), ref_log_probs=None)
    assert collate([without]).ref_log_probs is None
    with pytest.raises(ValueError, match=r"rows \[5\]"):
        collate([make_sample(1), without])
    buffer = make_buffer(4)
    buffer.extend([make_sample(1), without])
    with pytest.raises(ValueError, match=r"rows \[5\]"):
        row_ids(buffer)
