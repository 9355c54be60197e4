"""Saves a run: the policy, and what the run goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from expert_iteration.checkpoint import CheckpointWriter, Snapshot
from expert_iteration.model import Policy

WRITE_BYTES_PER_S = 100e6
"""Assumed until a save has been timed."""


class RunSaver:
    """Copies what a checkpoint holds and has it written beside the run.

    Args:
        writer: writes, and keeps as many as wanted.
        policy: its weights are saved.
        tokenizer: saved with them.
        metadata: what is the same in every checkpoint of the run, as plain JSON.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        metadata: Mapping[str, Any],
    ) -> None:
        self._writer = writer
        self._policy = policy
        self._tokenizer = tokenizer
        self._metadata = metadata

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        policy_version: int,
        score: float | None,
        engine_weights: Mapping[str, Tensor] | None,
    ) -> None:
        """Takes a checkpoint after `step` optimizer steps; it is on disk once `wait` returns.

        Args:
            state: what the run goes on from, in plain types and tensors.
            step: optimizer steps so far.
            policy_version: publishes so far.
            score: what the best checkpoint has the highest of.
            engine_weights: what the engine holds, where a resumed run needs it.
        """
        metadata = {**self._metadata, "policy_version": policy_version, "score": score}
        self._writer.submit(
            Snapshot(
                self._policy,
                self._tokenizer,
                step=step,
                metadata=metadata,
                state=state,
                engine_weights=engine_weights,
            )
        )

    def wait(self) -> None:
        """Waits for what is being written; raises ComponentError when the last save failed."""
        self._writer.wait()

    def estimate_s(self) -> float:
        """Seconds that a save takes: the longest so far, or by the size of weights and moments."""
        num_trained = sum(parameter.numel() for parameter in self._policy.trainable_parameters())
        return self._writer.longest_s or 3 * 4 * num_trained / WRITE_BYTES_PER_S
