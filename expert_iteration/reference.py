"""Log-probs of the frozen model that the policy is held to, for selected rollouts only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expert_iteration.log_probs import token_log_probs
from expert_iteration.model import Policy
from expert_iteration.replay_buffer import collate
from expert_iteration.types import TrainingSample


class Reference(Protocol):
    """Anything that can say how likely the reference finds given responses."""

    def log_probs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        """One (T,) float32 tensor per sample on the CPU, zero outside the response."""
        ...


class FrozenReference:
    """A copy of the model as it was at the start.

    Args:
        model: in eval mode; it is never written to.
        batch_size: sequences per forward pass.
        packed: whether sequences are packed; see log_probs.token_log_probs.
    """

    def __init__(self, model: PreTrainedModel, *, batch_size: int, packed: bool = False) -> None:
        self._model = model.eval().requires_grad_(False)
        self._batch_size = batch_size
        self._packed = packed

    def log_probs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        return _log_probs(self._model, samples, self._batch_size, nullcontext(), packed=self._packed)


class AdapterOffReference:
    """The policy's own base model, with the adapter switched off while it is asked.

    The adapter must be one that this run put on: switched off, a model that came with a trained adapter would be
    another model than the one the run started from. Such models are refused when they are checked and when they load.
    """

    def __init__(self, policy: Policy, *, batch_size: int, packed: bool = False) -> None:
        assert policy.is_lora
        self._packed = packed
        self._policy = policy
        self._batch_size = batch_size

    def log_probs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        with self._policy.disable_adapter():
            autocast = self._policy.autocast()
            return _log_probs(self._policy.model, samples, self._batch_size, autocast, packed=self._packed)


def with_reference(reference: Reference | None, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with the reference's log-probs, or as they are when the run needs none."""
    if reference is None or not samples:
        return list(samples)
    values = reference.log_probs(samples)
    return [replace(sample, ref_log_probs=value) for sample, value in zip(samples, values, strict=True)]


@torch.no_grad()
def _log_probs(
    model: nn.Module,
    samples: Sequence[TrainingSample],
    batch_size: int,
    autocast: AbstractContextManager[object],
    *,
    packed: bool,
) -> list[Tensor]:
    device = next(model.parameters()).device
    # Like lengths together, so that little is padded; packed, samples of one prompt next to each other, to share it.
    longest: dict[int, int] = {}
    for sample in samples:
        longest[sample.row_id] = max(longest.get(sample.row_id, 0), len(sample.token_ids))

    def place(index: int) -> tuple[int, int]:
        sample = samples[index]
        return (longest[sample.row_id], sample.row_id) if packed else (len(sample.token_ids), 0)

    order = sorted(range(len(samples)), key=place)
    values: dict[int, Tensor] = {}
    with autocast:
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = collate([replace(samples[index], ref_log_probs=None) for index in indices]).to(device)
            rows = token_log_probs(
                model, batch.token_ids, batch.loss_mask, batch.attention_mask, packed=packed
            )  # (B, T)
            for index, row in zip(indices, rows.cpu(), strict=True):
                values[index] = row[: len(samples[index].token_ids)].clone()
    return [values[index] for index in range(len(samples))]
