"""One optimizer step at a time: forward, loss, backward, clip, step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from expert_iteration.config.schema import KLScheduleConfig, OptimizerConfig
from expert_iteration.errors import ComponentError
from expert_iteration.log_probs import token_log_probs
from expert_iteration.loss import Denominators, LossTerms, SFTLoss
from expert_iteration.model import Policy
from expert_iteration.optim import kl_coefficient, learning_rate, make_optimizer, set_learning_rate
from expert_iteration.types import Batch


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
        optimizer_steps: steps so far.
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
        self.total_steps = total_steps
        self._packed = packed
        self._optimizer_config = optimizer_config
        self._kl_to_ref_coeff = kl_to_ref_coeff
        self._kl_to_ref_schedule = kl_to_ref_schedule
        self._parameters = list(policy.trainable_parameters())
        self._optimizer = make_optimizer(self._parameters, optimizer_config)
        self._clipped_steps = 0
        self._steps_at_publish = 0

    def step(self, micro_batches: Sequence[Batch], *, progress: float) -> dict[str, float]:
        """One optimizer step over all micro-batches together; a step's worth of metrics.

        `progress` in [0, 1) is the share of the run that lies behind; learning rate and KL coefficient follow from it.

        Raises:
            ComponentError: loss or gradient is not finite. The weights are as they were before the step.
        """
        rate = learning_rate(self._optimizer_config, progress, self.total_steps)
        coefficient = kl_coefficient(self._kl_to_ref_coeff, self._kl_to_ref_schedule, progress)
        denominators = Denominators.of(micro_batches)
        ages = self.policy_version - torch.cat([batch.policy_versions for batch in micro_batches])  # (sequences,)
        assert (ages >= 0).all(), "a sample cannot be newer than the policy"
        sums = self._forward_backward(micro_batches, denominators, coefficient)
        grad_norm = self._optimizer_step(rate, sums, micro_batches)
        metrics = {
            "loss/total": sums.total.item(),
            "loss/main": sums.main.item(),
            "loss/kl_to_ref": sums.kl_to_ref.item(),
            "loss/kl_to_ref_coeff": coefficient,
            "optim/grad_norm": grad_norm,
            "optim/clipped_share": self._clipped_steps / (self.optimizer_steps + 1),
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

    def _optimizer_step(self, rate: float, sums: _Sums, micro_batches: Sequence[Batch]) -> float:
        """Clips and steps; the gradient norm before clipping."""
        limit = self._optimizer_config.clip_grad_norm
        grad_norm = clip_grad_norm_(self._parameters, float("inf") if limit is None else limit).item()
        if not (isfinite(grad_norm) and isfinite(sums.total.item())):
            self._optimizer.zero_grad(set_to_none=True)
            rows = torch.cat([batch.row_ids for batch in micro_batches]).tolist()
            raise ComponentError(
                f"optimizer step {self.optimizer_steps}: loss {sums.total.item()}, gradient norm {grad_norm} on "
                f"samples of rows {rows}; the weights are as before the step. Lower optimizer.lr, or compute in float32"
            )
        self._clipped_steps += limit is not None and grad_norm > limit
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return grad_norm
