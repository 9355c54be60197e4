"""Log-probabilities of given tokens: shift, gather, mask, with the vocabulary projection on response positions only.

Shapes: B sequences, T tokens, H hidden size, R response tokens of the whole batch, V vocabulary.
"""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from expert_iteration.packing import pack

MAX_DIFFERENCE = 0.05
"""Between log-probs that are computed in two ways; bfloat16 differs by less."""
CHUNK_TOKENS = 128
"""Positions projected onto the vocabulary at a time; their logits are recomputed in the backward pass."""


def gather_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target] in float32, as gather minus logsumexp: (..., V), (...) -> (...)."""
    logits = logits.float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a peft wrapper (its adapters stay active), or the model itself."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), f"{type(base).__name__} is no transformers model"
    return base


def position_ids(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones, whatever side the padding is on: (B, T) -> (B, T)."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def token_log_probs(
    model: nn.Module,
    token_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    packed: bool = False,
) -> Tensor:
    """log p(token_t | tokens before t) under `model` at temperature 1.

    Args:
        model: a causal language model of transformers, or one wrapped by peft.
        token_ids: (B, T).
        mask: (B, T) bool, the tokens that are asked for; the first column cannot be, nothing comes before it.
        attention_mask: (B, T) bool, false on padding; all true when left out.
        chunk_tokens: positions projected onto the vocabulary at a time.
        packed: whether the model sees several sequences in a row, and a shared prompt once (see packing.py). The result
            is the same but for rounding. Needs `can_pack(model)` and padding on the right.

    Returns:
        (B, T) float32, zero where `mask` is false.
    """
    if mask[:, 0].any():
        raise ValueError("mask[:, 0]: the first token has nothing before it, so it has no log-probability")
    if attention_mask is None:
        attention_mask = torch.ones_like(token_ids, dtype=torch.bool)
    causal_lm = unwrap(model)
    before = (_packed_hidden if packed else _padded_hidden)(causal_lm, token_ids, mask, attention_mask)  # (R, H)
    targets = token_ids[mask]  # (R,), in the same row-major order
    values = _projected_log_probs(causal_lm, before, targets, chunk_tokens)  # (R,)
    return torch.zeros(token_ids.shape, device=values.device).masked_scatter(mask, values)  # (B, T)


def can_pack(model: nn.Module) -> bool:
    """Whether the model's attention takes a mask of its own for every query: SDPA without sliding windows, and no
    layers that carry a state from token to token."""
    config = unwrap(model).config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None
    return config._attn_implementation == "sdpa" and layer_types == {"full_attention"} and not has_window


def _padded_hidden(causal_lm: PreTrainedModel, token_ids: Tensor, mask: Tensor, attention_mask: Tensor) -> Tensor:
    """(R, H), the last hidden state at the position that predicts each token asked for."""
    hidden = causal_lm.get_decoder()(
        input_ids=token_ids,
        attention_mask=attention_mask.long(),
        position_ids=position_ids(attention_mask),
        use_cache=False,
    ).last_hidden_state  # (B, T, H)
    return hidden[:, :-1][mask[:, 1:]]


def _packed_hidden(causal_lm: PreTrainedModel, token_ids: Tensor, mask: Tensor, attention_mask: Tensor) -> Tensor:
    """The same from a packed batch."""
    rows = pack(token_ids, mask, attention_mask)
    hidden = causal_lm.get_decoder()(
        input_ids=rows.token_ids,
        attention_mask=rows.attention_mask,
        position_ids=rows.position_ids,
        use_cache=False,
    ).last_hidden_state  # (rows, width, H)
    return hidden.flatten(0, 1)[rows.predictors]


def _projected_log_probs(causal_lm: PreTrainedModel, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """(R, H), (R,) -> (R,), one chunk of logits in memory at a time, in the backward pass too."""

    def log_probs_of_chunk(hidden_chunk: Tensor, target_chunk: Tensor) -> Tensor:
        return gather_log_probs(project(causal_lm, hidden_chunk), target_chunk)

    chunks = []
    for hidden_chunk, target_chunk in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            chunks.append(checkpoint(log_probs_of_chunk, hidden_chunk, target_chunk, use_reentrant=False))
        else:
            chunks.append(log_probs_of_chunk(hidden_chunk, target_chunk))
    return torch.cat(chunks)


def project(causal_lm: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of hidden states: (..., H) -> (..., V), with the soft cap and the scales that some families apply."""
    logits = causal_lm.get_output_embeddings()(hidden)
    config = causal_lm.config
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    if scale is not None:
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)  # Granite divides
    if divisor is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def check_projection(model: nn.Module, *, packed: bool = False) -> None:
    """Raises ValueError unless `token_log_probs` agrees with the model's own logits on a short sequence.

    Families differ in what they do between the last hidden state and the logits, and in what they make of a mask that
    packs sequences; one that does something unknown here would train on the wrong distribution without a word.
    """
    causal_lm = unwrap(model)
    size = min(causal_lm.config.get_text_config().vocab_size, 64)
    token_ids = torch.arange(size // 2, size, device=next(causal_lm.parameters()).device)[:8].unsqueeze(0)  # (1, T)
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[:, 0] = False
    was_training = causal_lm.training
    causal_lm.eval()
    logits = causal_lm(input_ids=token_ids).logits  # (1, T, V)
    expected = gather_log_probs(logits[:, :-1], token_ids[:, 1:])  # (1, T - 1)
    actual = token_log_probs(model, token_ids, mask)[:, 1:]  # (1, T - 1)
    if packed:
        _check_packing(model, token_ids, mask, expected)
    causal_lm.train(was_training)
    difference = (expected - actual).abs().max().item()
    if not difference < MAX_DIFFERENCE:
        raise ValueError(
            f"{type(causal_lm).__name__}: log_probs.project gives log-probabilities that are off by {difference:.3g}, "
            "so the model's head does something between last hidden state and logits that is not known here"
        )


def _check_packing(model: nn.Module, token_ids: Tensor, mask: Tensor, expected: Tensor) -> None:
    """The same for the sequence, (1, T), packed beside another one and beside one that shares its beginning."""
    others = token_ids.flip(-1), torch.cat([token_ids[:, :1], token_ids[:, 1:].flip(-1)], dim=-1)
    rows = torch.cat([token_ids, *others])  # (3, T)
    actual = token_log_probs(model, rows, mask.expand_as(rows), packed=True)[:1, 1:]  # (1, T - 1)
    difference = (expected - actual).abs().max().item()
    if not difference < MAX_DIFFERENCE:
        raise ValueError(
            f"{type(unwrap(model)).__name__}: packed, its log-probabilities are off by {difference:.3g}, "
            "so its attention does something with its mask that is not known here; set train.packing=false"
        )
