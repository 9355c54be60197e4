"""One optimizer step at a time: forward, loss, backward, clip, step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from expert_iteration.config.schema import KLScheduleConfig, OptimizerConfig
from expert_iteration.log_probs import token_log_probs
from expert_iteration.loss import Denominators, LossTerms, SFTLoss
from expert_iteration.model import Policy
from expert_iteration.optim import kl_coefficient, learning_rate, make_optimizer, set_learning_rate
from expert_iteration.types import Batch

COUNTERS = (
    "policy_version",
    "optimizer_steps",
    "skipped_in_a_row",
    "_skipped_steps",
    "_clipped_steps",
    "_steps_at_publish",
)
"""Attributes of the trainer that a checkpoint holds."""


@dataclass(slots=True)
class _Sums:
    """Running sums over the micro-batches of a step; they stay on the device until the step is over."""

    main: Tensor
    kl_to_ref: Tensor
    total: Tensor
    engine_difference: Tensor
    engine_tokens: Tensor
    """Tokens that an engine has sampled."""

    @classmethod
    def zeros(cls, device: torch.device) -> _Sums:
        return cls(*torch.zeros(5, device=device).unbind())

    def add(self, terms: LossTerms, log_probs: Tensor, batch: Batch) -> None:
        self.main += terms.main.detach()
        self.kl_to_ref += terms.kl_to_ref.detach()
        self.total += terms.total.detach()
        sampled = batch.loss_mask & ~batch.engine_log_probs.isnan()  # (B, T)
        difference = (log_probs.detach() - batch.engine_log_probs).abs()  # (B, T)
        self.engine_difference += torch.where(sampled, difference, 0.0).sum()
        self.engine_tokens += sampled.sum()


class Trainer:
    """Owns the policy and its optimizer.

    Args:
        policy: the model that is trained.
        loss: main term and KL term.
        optimizer_config: optimizer, peak rate, clipping and rate schedule.
        kl_to_ref_coeff: weight of the KL term at the start of the run.
        kl_to_ref_schedule: how that weight moves.
        total_steps: length of the rate schedule in optimizer steps.
        packed: whether sequences are packed; see log_probs.token_log_probs.

    Attributes:
        policy_version: publishes so far; the weight sync counts it up.
        optimizer_steps: steps so far, skipped ones included.
        skipped_in_a_row: of the last steps, those without a finite loss and gradient, which moved no weights.
    """

    def __init__(
        self,
        policy: Policy,
        loss: SFTLoss,
        *,
        optimizer_config: OptimizerConfig,
        kl_to_ref_coeff: float,
        kl_to_ref_schedule: KLScheduleConfig,
        total_steps: int,
        packed: bool = False,
    ) -> None:
        self.policy = policy
        self.loss = loss
        self.policy_version = 0
        self.optimizer_steps = 0
        self.skipped_in_a_row = 0
        self.total_steps = total_steps
        self._packed = packed
        self._optimizer_config = optimizer_config
        self._kl_to_ref_coeff = kl_to_ref_coeff
        self._kl_to_ref_schedule = kl_to_ref_schedule
        self._parameters = list(policy.trainable_parameters())
        self._optimizer = make_optimizer(self._parameters, optimizer_config)
        self._clipped_steps = 0
        self._skipped_steps = 0
        self._steps_at_publish = 0

    def step(self, micro_batches: Sequence[Batch], *, progress: float) -> dict[str, float]:
        """One optimizer step over all micro-batches together; a step's worth of metrics.

        `progress` in [0, 1) is the share of the run that lies behind; learning rate and KL coefficient follow from it.
        Where loss or gradient is not finite, weights and optimizer stay as they were and the step counts as skipped.
        """
        rate = learning_rate(self._optimizer_config, progress, self.total_steps)
        coefficient = kl_coefficient(self._kl_to_ref_coeff, self._kl_to_ref_schedule, progress)
        denominators = Denominators.of(micro_batches)
        ages = self.policy_version - torch.cat([batch.policy_versions for batch in micro_batches])  # (sequences,)
        assert (ages >= 0).all(), "a sample cannot be newer than the policy"
        sums = self._forward_backward(micro_batches, denominators, coefficient)
        grad_norm = self._optimizer_step(rate, sums)
        metrics = {
            "loss/total": sums.total.item(),
            "loss/main": sums.main.item(),
            "loss/kl_to_ref": sums.kl_to_ref.item(),
            "loss/kl_to_ref_coeff": coefficient,
            "optim/grad_norm": grad_norm,
            "optim/clipped_share": self._clipped_steps / (self.optimizer_steps + 1),
            "optim/skipped_steps": self._skipped_steps,
            "optim/learning_rate": rate,
            "policy/version": self.policy_version,
            "policy/age_mean": ages.double().mean().item(),
            "policy/age_max": ages.max().item(),
        }
        # Once the policy has moved on, a difference says how far it moved and nothing about the engine.
        if self.optimizer_steps == self._steps_at_publish and ages.max() == 0 and sums.engine_tokens > 0:
            metrics["policy/engine_log_prob_difference"] = (sums.engine_difference / sums.engine_tokens).item()
        self.optimizer_steps += 1
        return metrics

    def count_publish(self) -> int:
        """Counts the policy version up and returns it; called by the weight sync when the weights have arrived."""
        self.policy_version += 1
        self._steps_at_publish = self.optimizer_steps
        return self.policy_version

    def state_dict(self, *, with_optimizer: bool = True) -> dict[str, Any]:
        """Counters and optimizer, without the weights; loads with `torch.load(weights_only=True)`."""
        optimizer = self._optimizer.state_dict() if with_optimizer else None
        return {"optimizer": optimizer, **{name: getattr(self, name) for name in COUNTERS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; the policy has to have the weights of then."""
        if state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        for name in COUNTERS:
            setattr(self, name, state[name])

    def _forward_backward(
        self, micro_batches: Sequence[Batch], denominators: Denominators, coefficient: float
    ) -> _Sums:
        device = self._parameters[0].device
        sums = _Sums.zeros(device)
        for micro_batch in micro_batches:
            batch = micro_batch.to(device)
            with self.policy.autocast():
                log_probs = token_log_probs(
                    self.policy.model, batch.token_ids, batch.loss_mask, batch.attention_mask, packed=self._packed
                )  # (B, T)
            terms = self.loss(log_probs, batch, denominators, kl_to_ref_coeff=coefficient)
            terms.total.backward()
            sums.add(terms, log_probs, batch)
        return sums

    def _optimizer_step(self, rate: float, sums: _Sums) -> float:
        """Clips and steps, or skips; the gradient norm before clipping."""
        limit = self._optimizer_config.clip_grad_norm
        grad_norm = clip_grad_norm_(self._parameters, float("inf") if limit is None else limit).item()
        if isfinite(grad_norm) and isfinite(sums.total.item()):
            self._clipped_steps += limit is not None and grad_norm > limit
            set_learning_rate(self._optimizer, rate)
            self._optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self._skipped_steps += 1
            self.skipped_in_a_row += 1
        self._optimizer.zero_grad(set_to_none=True)
        return grad_norm
