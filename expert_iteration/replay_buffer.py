"""The replay buffer: what was selected, until it is trained on.

Storage and ring writer are torchrl's. The prioritized sampler is ours: torchrl's own needs its C++ extension, ours
needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data.replay_buffers import LazyStackStorage, Sampler, Storage
from torchrl.data.replay_buffers import ReplayBuffer as TorchRLReplayBuffer

from expert_iteration.types import Batch, TrainingSample

Shuffle = Literal["samples", "groups"]


def sampling_probabilities(rewards: Tensor, alpha: float, epsilon: float) -> Tensor:
    """Probability of each sample, proportional to its priority (reward - minimum + epsilon)^alpha.

    Args:
        rewards: (N,), at least one, all finite.
        alpha: 0 is uniform; larger prefers high rewards more.
        epsilon: keeps the lowest reward's priority above zero.

    Returns:
        (N,) float64, sums to 1.

    Raises:
        ValueError: a reward is NaN or infinite.
    """
    if not rewards.isfinite().all():
        raise ValueError(f"rewards have to be finite, got {rewards.tolist()}")
    gaps = rewards.double() - rewards.double().min() + epsilon
    # Relative to the largest, so that a large alpha cannot overflow.
    priorities = (gaps / gaps.max()) ** alpha
    return priorities / priorities.sum()


def importance_weights(rewards: Tensor, alpha: float, beta: float, epsilon: float) -> Tensor:
    """Weights (1 / (N p))^beta divided by the largest of the buffer, so that they are at most 1.

    The largest belongs to the lowest reward, whose priority is epsilon^alpha; N and the sum of priorities cancel. With
    beta = 1 the weighted mean over draws is proportional to the plain mean over the buffer (Schaul et al. 2016,
    https://arxiv.org/abs/1511.05952, section 3.4).

    Returns:
        (N,) float64; all 1 when beta is 0.
    """
    gaps = rewards.double() - rewards.double().min() + epsilon
    return (epsilon / gaps) ** (alpha * beta)


class PrioritizedSampler(Sampler):
    """Draws with replacement, higher rewards more often.

    A torchrl sampler for any storage of tensordicts with a scalar "reward". It adds "importance_weights" (B,) float32
    to the info that `sample(..., return_info=True)` of a torchrl buffer returns. Everything that it knows follows from
    the storage, so it has no state to save; draws come from the generator of the buffer that owns it.

    A reward is read from the storage once, when the first draw after its sample was stored needs it.
    """

    def __init__(self, alpha: float, beta: float, epsilon: float) -> None:
        self.alpha = alpha
        self.beta = beta
        self.epsilon = epsilon
        self._rewards = torch.empty(0, dtype=torch.float64)  # (N,), as read so far
        self._unread: set[int] = set()
        """Indices below N whose sample has been replaced since."""
        self._boundaries: Tensor | None = None  # (N,) cumulative probabilities; None until the next draw needs them
        self._weights: Tensor | None = None  # (N,)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Indices (B,) of the drawn samples and their importance weights."""
        if len(storage) == 0:
            raise ValueError("cannot draw from an empty buffer")
        if self._boundaries is None or self._weights is None:
            self._read_rewards(storage)
            self._boundaries = sampling_probabilities(self._rewards, self.alpha, self.epsilon).cumsum(0)
            self._weights = importance_weights(self._rewards, self.alpha, self.beta, self.epsilon).float()
        draws = torch.rand(batch_size, dtype=torch.float64, generator=self._rng)  # (B,)
        # Without the last boundary, which rounding may put below a draw, every draw falls on a sample.
        index = torch.searchsorted(self._boundaries[:-1], draws, right=True)  # (B,)
        return index, {"importance_weights": self._weights[index]}

    def _read_rewards(self, storage: Storage) -> None:
        """Reads the rewards that are new."""
        num_read = len(self._rewards)
        replaced = torch.tensor(sorted(self._unread), dtype=torch.int64)
        if len(replaced) > 0:
            self._rewards[replaced] = storage.get(replaced)["reward"].double()
        if len(storage) > num_read:
            added = storage.get(torch.arange(num_read, len(storage)))["reward"].double()
            self._rewards = torch.cat([self._rewards, added])
        self._unread.clear()

    def add(self, index: int) -> None:
        self.mark_update(index)

    def extend(self, index: Tensor) -> None:
        self.mark_update(index)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        changed = torch.as_tensor(index).reshape(-1).tolist()
        self._unread.update(place for place in changed if place < len(self._rewards))
        self._boundaries = self._weights = None

    def _empty(self) -> None:
        self._rewards = torch.empty(0, dtype=torch.float64)
        self._unread.clear()
        self._boundaries = self._weights = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._empty()

    def dumps(self, path: str | Path) -> None:
        """Writes nothing: there is no state."""

    def loads(self, path: str | Path) -> None:
        self._empty()


class ReplayBuffer:
    """Holds at most `capacity` training samples; a new one replaces the oldest.

    Args:
        capacity: most samples held.
        prioritized: draw high rewards more often, with replacement, instead of visiting each sample once.
        shuffle: what is put into random order when each sample is visited once. "groups" keeps the samples of one visit
            to a prompt next to each other, so that packing computes their prompt once.
        alpha, beta, epsilon: as in `sampling_probabilities` and `importance_weights`; unused unless prioritized.
        seed: fixes permutations and draws.
    """

    def __init__(
        self,
        capacity: int,
        *,
        prioritized: bool,
        alpha: float,
        beta: float,
        epsilon: float,
        seed: int,
        shuffle: Shuffle = "samples",
    ) -> None:
        self._capacity = capacity
        self._prioritized = prioritized
        self._shuffle = shuffle
        self._generator = torch.Generator().manual_seed(seed)
        self._pass_start = self._generator.get_state()
        """Random state before the pass that was begun last."""
        self._buffer = TorchRLReplayBuffer(
            storage=LazyStackStorage(capacity),
            sampler=PrioritizedSampler(alpha, beta, epsilon) if prioritized else None,
            generator=self._generator,
        )

    def __len__(self) -> int:
        return len(self._buffer)

    def extend(self, samples: Sequence[TrainingSample]) -> int:
        """Stores copies, in the order given, and returns how many; an empty sequence changes nothing.

        Raises:
            ValueError: a reward is NaN or infinite; nothing is stored then.
        """
        for sample in samples:
            if not math.isfinite(sample.reward):
                raise ValueError(f"row {sample.row_id} has the reward {sample.reward}; rewards have to be finite")
        for sample in samples:
            self._buffer.add(_to_tensordict(sample))
        return len(samples)

    def clear(self) -> None:
        """Drops every sample."""
        self._buffer.empty()

    def evict_older_than(self, min_version: int) -> int:
        """Drops the samples of policy versions below `min_version` and returns how many they were."""
        items = self._oldest_first()
        kept = [item for item in items if int(item["policy_version"]) >= min_version]
        if len(kept) < len(items):
            self._buffer.empty()
            for item in kept:
                self._buffer.add(item)
        return len(items) - len(kept)

    def epoch(self, batch_size: int) -> Iterator[Batch]:
        """One pass of ceil(size / batch_size) micro-batches over what the buffer holds.

        Each sample is visited once, in a new random order; when prioritized, as many are drawn with replacement.

        Raises:
            RuntimeError: the buffer was written to in the middle of a pass that visits each sample once.
        """
        size = len(self)
        if size == 0:
            return
        self._pass_start = self._generator.get_state()
        if self._prioritized:
            for start in range(0, size, batch_size):
                drawn, info = self._buffer.sample(min(batch_size, size - start), return_info=True)
                yield collate([_to_sample(item) for item in drawn.unbind(0)], info["importance_weights"])
        else:
            order, write_count = self._random_order(size), self._buffer.write_count
            for start in range(0, size, batch_size):
                if (len(self), self._buffer.write_count) != (size, write_count):
                    raise RuntimeError("the buffer was written to in the middle of a pass over it")
                items = self._buffer[order[start : start + batch_size]].unbind(0)
                yield collate([_to_sample(item) for item in items])

    def draw(self, count: int, batch_size: int) -> list[Batch]:
        """`count` samples in micro-batches of at most `batch_size`, from what is held now.

        When prioritized they are drawn with replacement; otherwise none comes a second time before every one has come
        once.

        Raises:
            ValueError: the buffer is empty.
        """
        if len(self) == 0:
            raise ValueError("cannot draw from an empty buffer")
        sizes = [min(batch_size, count - start) for start in range(0, count, batch_size)]
        if self._prioritized:
            draws = [self._buffer.sample(size, return_info=True) for size in sizes]
            return [
                collate([_to_sample(item) for item in drawn.unbind(0)], info["importance_weights"])
                for drawn, info in draws
            ]
        passes = [self._random_order(len(self)) for _ in range(-(-count // len(self)))]
        order = torch.cat(passes)[:count].split(batch_size)
        return [collate([_to_sample(item) for item in self._buffer[part].unbind(0)]) for part in order]

    def _random_order(self, size: int) -> Tensor:
        """(size,) indices, each once."""
        if self._shuffle == "samples":
            return torch.randperm(size, generator=self._generator)
        members: dict[tuple[int, int], list[int]] = {}
        for index, item in enumerate(self._buffer[torch.arange(size)].unbind(0)):
            members.setdefault((int(item["row_id"]), int(item["epoch"])), []).append(index)
        groups = list(members.values())
        chosen = torch.randperm(len(groups), generator=self._generator).tolist()
        return torch.tensor([index for group in chosen for index in groups[group]])

    def stats(self) -> dict[str, float]:
        """Size, rewards and response lengths (in tokens) of what is held now; the size alone when empty."""
        if len(self) == 0:
            return {"size": 0}
        items = self._oldest_first()
        rewards = torch.stack([item["reward"] for item in items])  # (N,)
        lengths = torch.stack([item["loss_mask"].sum() for item in items]).double()  # (N,)
        return {
            "size": len(items),
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std(correction=0)),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "response_tokens_mean": float(lengths.mean()),
            "response_tokens_min": float(lengths.min()),
            "response_tokens_max": float(lengths.max()),
        }

    def state_dict(self, *, at_start_of_pass: bool = False) -> dict[str, Any]:
        """Samples, ring cursor and random state; loads with `torch.load(weights_only=True)`.

        In the middle of a pass that is to be begun again, `at_start_of_pass` gives the random state of its beginning.
        """
        generator = self._pass_start if at_start_of_pass else self._generator.get_state()
        return {"buffer": self._buffer.state_dict(), "generator": generator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken: same samples, same order of replacement, same draws."""
        self._buffer.load_state_dict(state_dict["buffer"])
        self._generator.set_state(state_dict["generator"])
        # torchrl restores a generator of its own; permutations and draws have to share one.
        self._buffer.set_rng(self._generator)

    def _oldest_first(self) -> list[TensorDictBase]:
        size = len(self)
        if size == 0:
            return []
        oldest = self._buffer.write_count % self._capacity if size == self._capacity else 0
        return list(self._buffer[(torch.arange(size) + oldest) % size].unbind(0))


def collate(samples: Sequence[TrainingSample], importance_weights: Tensor | None = None) -> Batch:
    """Pads samples on the right to the longest of them.

    Padding is id 0, false in both masks (which follow from lengths, never from ids), NaN in the engine's log-probs and
    0 in the reference's.

    Args:
        samples: at least one.
        importance_weights: (B,); all 1 when None.

    Raises:
        ValueError: a sample has no response token, or some have reference log-probs and some have none.
    """
    for sample in samples:
        if not sample.loss_mask.any():
            raise ValueError(f"the sample of row {sample.row_id}, epoch {sample.epoch}, has no response token")
    ref_log_probs = [sample.ref_log_probs for sample in samples if sample.ref_log_probs is not None]
    if len(ref_log_probs) not in (0, len(samples)):
        without = [sample.row_id for sample in samples if sample.ref_log_probs is None]
        raise ValueError(f"the samples of rows {without} have no reference log-probs, others of the batch have them")
    lengths = torch.tensor([sample.token_ids.shape[0] for sample in samples])  # (B,)
    if importance_weights is None:
        importance_weights = torch.ones(len(samples))
    return Batch(
        token_ids=pad_sequence([sample.token_ids for sample in samples], batch_first=True),
        attention_mask=torch.arange(int(lengths.max())) < lengths[:, None],
        loss_mask=pad_sequence([sample.loss_mask for sample in samples], batch_first=True),
        engine_log_probs=pad_sequence(
            [sample.engine_log_probs for sample in samples], batch_first=True, padding_value=math.nan
        ),
        ref_log_probs=pad_sequence(ref_log_probs, batch_first=True) if ref_log_probs else None,
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        importance_weights=importance_weights,
        policy_versions=torch.tensor([sample.policy_version for sample in samples]),
        row_ids=torch.tensor([sample.row_id for sample in samples]),
    )


def _to_tensordict(sample: TrainingSample) -> TensorDict:
    """Numbers become tensors as well: torchrl's state_dict drops everything else without a word."""
    fields: dict[str, Tensor] = {
        "token_ids": sample.token_ids.detach().clone(),
        "loss_mask": sample.loss_mask.detach().clone(),
        "engine_log_probs": sample.engine_log_probs.detach().clone(),
        "reward": torch.tensor(sample.reward, dtype=torch.float64),
        "policy_version": torch.tensor(sample.policy_version),
        "row_id": torch.tensor(sample.row_id),
        "epoch": torch.tensor(sample.epoch),
    }
    if sample.ref_log_probs is not None:
        fields["ref_log_probs"] = sample.ref_log_probs.detach().clone()
    return TensorDict(fields)


def _to_sample(item: TensorDictBase) -> TrainingSample:
    return TrainingSample(
        token_ids=item["token_ids"],
        loss_mask=item["loss_mask"],
        engine_log_probs=item["engine_log_probs"],
        ref_log_probs=item.get("ref_log_probs", None),
        reward=item["reward"].item(),
        policy_version=int(item["policy_version"]),
        row_id=int(item["row_id"]),
        epoch=int(item["epoch"]),
    )
