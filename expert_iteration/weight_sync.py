"""Carries the trained weights to the engine and proves that they arrived."""

from __future__ import annotations

from expert_iteration.engines.checksum import weights_checksum
from expert_iteration.errors import WeightSyncError
from expert_iteration.trainer import Trainer
from expert_iteration.types import Engine


class InProcessWeightSync:
    """Copies the policy's dense weights into the engine of the same process.

    The trainer's side computes what the engine has to hold (names, shapes and bits in the engine's type); the engine
    computes what it does hold, from its own tensors. A publish counts only when both agree.

    The weights that a run starts from are pushed at once and are version 0.
    """

    def __init__(self, trainer: Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._expected = self._push(trainer.policy_version)
        self.verify()

    def publish(self) -> int:
        """Pushes the weights, verifies them, counts the policy version up and returns it."""
        version = self._trainer.policy_version + 1
        self._expected = self._push(version)
        self._verify(version)
        return self._trainer.count_publish()

    def verify(self) -> None:
        """Raises WeightSyncError unless the engine holds the version and the content last published."""
        self._verify(self._trainer.policy_version)

    def _push(self, version: int) -> str:
        """Sends the weights; the checksum that the engine should have afterwards."""
        # Cast one by one, so that merged adapters are never held in float32 all at once.
        weights = {name: tensor.to(self._engine.dtype) for name, tensor in self._trainer.policy.merged_state()}
        self.changed_share = self._engine.load_weights(weights.items(), version)
        return weights_checksum(weights.items())

    def _verify(self, version: int) -> None:
        if self._engine.policy_version != version:
            raise WeightSyncError(
                f"the engine holds version {self._engine.policy_version} of the weights, "
                f"version {version} was published"
            )
        actual = self._engine.checksum()
        if actual != self._expected:
            raise WeightSyncError(
                f"the engine's weights of version {version} have the checksum {actual[:16]}, "
                f"those that were published have {self._expected[:16]}"
            )
