"""Drawing tokens: temperature and filters, then the inverse of the cumulative distribution at a uniform number.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from expert_iteration.log_probs import gather_log_probs
from expert_iteration.types import SamplingParams

BLOCK_TOKENS = 256
"""Tokens of the vocabulary whose weights are summed before the search for the drawn one."""


def uniforms(seeds: Sequence[int], max_tokens: int) -> Tensor:
    """(B, max_tokens) float32 in [0, 1): row b depends on seeds[b] alone, and a longer row begins with the shorter one.

    Each row is a stream of its own of a counter-based generator, keyed by all 64 bits of the seed (Salmon et al. 2011,
    Parallel Random Numbers: As Easy as 1, 2, 3). torch's CPU generator looks at the lower 32 bits only.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(max_tokens, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, max_tokens)  # (B, max_tokens)


def draw(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per sequence and its log-probability: (B, V) logits, (B,) uniform numbers -> (B,) int64, (B,) float32.

    The log-probability is the model's own, at temperature 1 and before any filter, whatever the token was drawn by.
    """
    tokens = sample_tokens(logits, uniform, sampling)
    return tokens, gather_log_probs(logits, tokens)


def sample_tokens(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> Tensor:
    """One token per sequence: (B, V) logits, (B,) uniform numbers in [0, 1) -> (B,) int64.

    At temperature 0 it is the likeliest token and the uniform numbers are ignored.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return inverse_cdf(filtered_scores(logits, sampling).exp_(), uniform)


def filtered_scores(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Unnormalised log-probabilities that a token is drawn from: (B, V) -> (B, V) float32, -inf where filtered out.

    In this order, as in vLLM: temperature; min-p; top-k; top-p over what the two before it have left. The likeliest
    token has the score 0 and passes every filter.
    """
    scores = logits.float()
    # The maximum goes first, so that a tiny temperature sends the others to -inf and never anything to inf or NaN.
    scores = (scores - scores.amax(-1, keepdim=True)).div_(sampling.temperature)
    if sampling.min_p > 0:
        scores.masked_fill_(scores < math.log(sampling.min_p), -torch.inf)
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[:, -1:]  # (B, 1)
        scores.masked_fill_(scores < kth, -torch.inf)  # tokens as likely as the k-th stay
    if sampling.top_p < 1:
        scores.masked_fill_(~_nucleus(scores, sampling.top_p), -torch.inf)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Fewest tokens, likeliest first, that together have the probability `top_p` (Holtzman et al. 2020): (B, V) bool.

    Of equally likely tokens the lower ids go first.
    """
    probs, order = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)  # (B, V)
    mass_before = F.pad(probs.cumsum(-1)[:, :-1], (1, 0))  # 0 for the likeliest token, which so always stays
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, mass_before < top_p)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds `uniform` times the total: (B, V), (B,) -> (B,) int64.

    `weights` is not negative and need not sum to 1; a token of weight 0 is never returned. Summed in two levels, first
    over blocks of the vocabulary and then inside one block: sums are fast where a scan over all of it is slow, and
    rounding errors stay small.
    """
    num_padding = -weights.shape[-1] % BLOCK_TOKENS
    if num_padding > 0:
        weights = F.pad(weights, (0, num_padding))
    blocks = weights.unflatten(-1, (-1, BLOCK_TOKENS))  # (B, V / BLOCK_TOKENS, BLOCK_TOKENS)
    block_weights = blocks.sum(-1)  # (B, V / BLOCK_TOKENS)
    block, rest = _first_above(block_weights, uniform * block_weights.sum(-1))
    chosen = blocks[torch.arange(len(blocks), device=blocks.device), block]  # (B, BLOCK_TOKENS)
    offset, _ = _first_above(chosen, rest)
    return block * BLOCK_TOKENS + offset


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index of positive weight whose cumulative weight exceeds `target`, and what of `target` lies inside it.

    (B, K), (B,) -> (B,), (B,). A target that rounding has carried to the total or beyond finds the last positive
    weight.
    """
    cumulative = weights.cumsum(-1)  # (B, K)
    # Excluded by their weight and not by a flat step: a parallel scan need not be monotone to the last bit.
    cumulative = cumulative.masked_fill(weights == 0, 0)
    total = cumulative.amax(-1)  # (B,)
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    index = (cumulative > target.unsqueeze(-1)).to(torch.uint8).argmax(-1, keepdim=True)  # (B, 1)
    before = (cumulative.gather(-1, index) - weights.gather(-1, index)).squeeze(-1)
    return index.squeeze(-1), (target - before).clamp(min=0)
