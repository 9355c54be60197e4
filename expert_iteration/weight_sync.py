"""Carries the trained weights to the engine and proves that they arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from expert_iteration.engines.checksum import weights_checksum
from expert_iteration.errors import WeightSyncError
from expert_iteration.log_probs import token_log_probs
from expert_iteration.model import Policy
from expert_iteration.trainer import Trainer
from expert_iteration.types import Engine, ScoringEngine


class Canary:
    """A few sequences that trainer and engine score after each publish: what they say has to agree.

    Names, shapes and bytes may all be right and the engine may compute something else all the same: its model may put
    weights into other places, or keep what it had prepared from the old ones.

    Args:
        policy: scores with its float32 weights, adapter included, without autocast and dropout.
        engine: scores with what it holds.
        sequences: token ids, at least two each.
        tolerance: largest mean absolute difference of log-probs, in nats per token.
    """

    def __init__(
        self, policy: Policy, engine: ScoringEngine, sequences: Sequence[Sequence[int]], tolerance: float
    ) -> None:
        if not sequences or min(map(len, sequences)) < 2:
            raise ValueError("a canary needs sequences of at least two tokens")
        self._policy = policy
        self._engine = engine
        self._sequences = [list(ids) for ids in sequences]
        self._tolerance = tolerance

    def check(self, version: int) -> float:
        """The mean absolute difference of the log-probs, in nats per token, of the replica where it is largest.

        Raises:
            WeightSyncError: it is above the tolerance or not a number.
        """
        trained = self._trained_log_probs()
        differences = [_mean_difference(trained, scored) for scored in self._engine.score(self._sequences)]
        for replica, difference in enumerate(differences):
            if not difference <= self._tolerance:  # NaN is not
                raise WeightSyncError(
                    f"after weights of version {version} arrived, trainer and engine (replica {replica}) differ by "
                    f"{difference:.4g} nats per token on {len(self._sequences)} sequences, where {self._tolerance:.4g} "
                    "is the most (inference_model.canary_tolerance): they compute different models, or the engine in a "
                    "type that is too coarse for the tolerance"
                )
        return max(differences)

    @torch.no_grad()
    def _trained_log_probs(self) -> list[list[float]]:
        """Of every token but the first, for each sequence."""
        model = self._policy.model
        device = next(model.parameters()).device
        lengths = torch.tensor([len(ids) for ids in self._sequences])  # (B,)
        token_ids = pad_sequence([torch.tensor(ids) for ids in self._sequences], batch_first=True)  # (B, T)
        attention_mask = torch.arange(token_ids.shape[1]) < lengths[:, None]  # (B, T)
        mask = attention_mask.clone()
        mask[:, 0] = False
        was_training = model.training
        model.eval()
        try:
            values = token_log_probs(model, token_ids.to(device), mask.to(device), attention_mask.to(device))
        finally:
            model.train(was_training)
        return [row[1:length].tolist() for row, length in zip(values.cpu(), lengths.tolist(), strict=True)]


def _mean_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    pairs = zip(one, other, strict=True)
    return fmean(abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True))


class VerifiedWeightSync:
    """Publishes the policy's dense weights to an engine.

    The trainer's side computes what the engine has to hold (names, shapes and bits in the engine's type); the engine
    says what it does hold. A publish counts only when both agree, and when the canary, if there is one, finds that both
    compute the same.

    The weights that a run starts from are pushed at once, as the trainer's version, which is 0 in a new run.

    Args:
        trainer: has the weights and counts the versions.
        engine: gets the weights.
        canary: compares both after each publish.
        published: what a resumed run published last, where the trainer has moved on since: pushed instead of the
            trainer's weights at first, without the canary, which would compare two versions.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        canary: Canary | None = None,
        published: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._canary = canary
        self.canary_difference: float | None = None
        if published is None:
            self._expected = self._push_policy(trainer.policy_version)
        else:
            self._expected = self._push(published, trainer.policy_version)

    def publish(self) -> int:
        """Pushes the weights, verifies them, counts the policy version up and returns it."""
        self._expected = self._push_policy(self._trainer.policy_version + 1)
        return self._trainer.count_publish()

    def published_weights(self) -> dict[str, Tensor]:
        """What the engine holds, by name. Not to be written to."""
        return self._engine.held_weights()

    def verify(self) -> None:
        """Raises WeightSyncError unless the engine holds the version and the content last published."""
        self._verify(self._trainer.policy_version, self._expected)

    def _push_policy(self, version: int) -> str:
        """Sends and verifies the trainer's weights; the checksum that the engine has now."""
        # Cast one by one, so that merged adapters are never held in float32 all at once.
        weights = {name: tensor.to(self._engine.dtype) for name, tensor in self._trainer.policy.merged_state()}
        expected = self._push(weights, version)
        if self._canary is not None:
            self.canary_difference = self._canary.check(version)
        return expected

    def _push(self, weights: Mapping[str, Tensor], version: int) -> str:
        self.changed_share = self._engine.load_weights(weights.items(), version)
        expected = weights_checksum(weights.items())
        self._verify(version, expected)
        return expected

    def _verify(self, version: int, expected: str) -> None:
        if self._engine.policy_version != version:
            raise WeightSyncError(
                f"the engine holds version {self._engine.policy_version} of the weights, "
                f"version {version} was published"
            )
        actual = self._engine.checksum()
        if actual != expected:
            raise WeightSyncError(
                f"the engine's weights of version {version} have the checksum {actual[:16]}, "
                f"those that were published have {expected[:16]}"
            )
