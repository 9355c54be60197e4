"""SFT loss with a KL term to the reference.

    loss = main + kl_to_ref_coeff * KL

Every term is a sum over the micro-batch divided by a denominator of the whole optimizer batch, so that the sum over
micro-batches, and with it the gradient, does not depend on how the batch is cut.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from expert_iteration.types import Batch


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over a whole optimizer batch."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, micro_batches: Sequence[Batch]) -> Denominators:
        return cls(
            tokens=sum(batch.num_response_tokens for batch in micro_batches),
            sequences=sum(batch.num_sequences for batch in micro_batches),
        )


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Scalars of one micro-batch, each already divided by the optimizer batch's denominator."""

    total: Tensor
    main: Tensor
    kl_to_ref: Tensor
    """Zero when there is no reference."""


def k3(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Per-token k3 estimate of KL(policy || reference): exp(d) - d - 1 with d = log ref - log policy, (B, T) -> (B, T).

    Zero where `mask` is false. The difference is masked before the exp: masking after it leaves NaN in the gradient
    wherever a masked position overflows. An infinite log-prob under the mask stays infinite, it is not hidden.

    On samples that were selected or replayed this is not an unbiased KL; it is a penalty that is zero where the
    policy equals the reference and grows with the distance. Source: Schulman, Approximating KL Divergence (2020).
    """
    difference = torch.where(mask, ref_log_probs - log_probs, 0.0)
    return torch.expm1(difference) - difference


def kl_to_ref(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Mean of `k3` over response tokens, as a scalar. Prompt and padding do not count."""
    return k3(log_probs, ref_log_probs, mask).sum() / mask.sum()


class SFTLoss:
    """Negative log-likelihood of the selected responses (or minor_sft), plus the KL term.

    Args:
        loss_function: "sft" is -log p. "minor_sft" is -log sigmoid(beta * (log p - log p_ref)) of whole sequences,
            which stops pushing once a sequence is likelier than under the reference (Xie et al. 2024,
            arXiv:2408.10642).
        minor_sft_beta: beta of minor_sft.
        normalization: "sequence" is the mean over sequences of each one's mean over its tokens; "token" is the mean
            over all response tokens. minor_sft has one value per sequence and always takes the mean over sequences.

    The KL term is a mean over response tokens. Importance weights multiply each sequence's share of both terms; the
    denominators stay counts.
    """

    def __init__(
        self,
        loss_function: str = "sft",
        *,
        minor_sft_beta: float = 0.1,
        normalization: str = "sequence",
    ) -> None:
        if loss_function not in ("sft", "minor_sft"):
            raise ValueError(f"loss_function={loss_function!r}: one of sft, minor_sft")
        if normalization not in ("sequence", "token"):
            raise ValueError(f"normalization={normalization!r}: one of sequence, token")
        self.loss_function = loss_function
        self.minor_sft_beta = minor_sft_beta
        self.normalization = normalization

    def __call__(
        self, log_probs: Tensor, batch: Batch, denominators: Denominators, *, kl_to_ref_coeff: float
    ) -> LossTerms:
        """Terms of one micro-batch from the policy's log-probs (B, T) of its tokens.

        Raises ValueError when a term needs the reference and the batch carries no reference log-probs.
        """
        if batch.ref_log_probs is None and (kl_to_ref_coeff > 0 or self.loss_function == "minor_sft"):
            raise ValueError("the batch has no reference log-probs, and minor_sft or the KL term needs them")
        weights = batch.importance_weights  # (B,)
        main = self._main(log_probs, batch, denominators)
        kl = log_probs.new_zeros(())
        if batch.ref_log_probs is not None:
            per_token = k3(log_probs, batch.ref_log_probs, batch.loss_mask)  # (B, T)
            kl = (weights * per_token.sum(-1)).sum() / denominators.tokens
        # Multiplying by a coefficient of zero would turn an infinite KL into NaN.
        total = main + kl_to_ref_coeff * kl if kl_to_ref_coeff > 0 else main
        return LossTerms(total=total, main=main, kl_to_ref=kl)

    def _main(self, log_probs: Tensor, batch: Batch, denominators: Denominators) -> Tensor:
        weights = batch.importance_weights  # (B,)
        summed = torch.where(batch.loss_mask, log_probs, 0.0).sum(-1)  # (B,)
        if self.loss_function == "minor_sft":
            assert batch.ref_log_probs is not None
            ref_summed = torch.where(batch.loss_mask, batch.ref_log_probs, 0.0).sum(-1)  # (B,)
            per_sequence = -logsigmoid(self.minor_sft_beta * (summed - ref_summed))  # (B,)
            return (weights * per_sequence).sum() / denominators.sequences
        if self.normalization == "token":
            return -(weights * summed).sum() / denominators.tokens
        return -(weights * summed / batch.loss_mask.sum(-1)).sum() / denominators.sequences
