"""The attention of the in-process engine: prompts are held once, and every sample attends to its prompt and to itself.

It is registered with transformers under `NAME`, so that any model which calls transformers' attention interface uses it
while a step is active. The model's own cache and masks are not used at all.

    prefill   prefix (once) | rest of each prompt      writes the prompts' slots
    decode    prompt of each sample | its own tokens   reads the prompts' slots, writes the samples'

A decode step makes the scores of a prompt's keys in one matrix product for all samples of the prompt, sets them beside
the scores of each sample's own keys, and takes one softmax over both.

Shapes: B sequences, Q query heads, H key-value heads, G = Q / H query heads that share one, D head size, J prompts,
M most samples of a prompt, P prompt columns, T own columns, L tokens of a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from expert_iteration.engines.slot_cache import SlotCache

NAME = "expert_iteration_shared"
"""Under which transformers knows this attention. It has no mask function: every mask is made here."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Layer types of transformers that are computed right here."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What a layer asks for besides queries, keys and values."""

    layer: int
    scale: float
    window: int | None
    """A query sees this many tokens, itself the last of them; None is all."""
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None
    """(Q,), a score of each query head that takes its share of the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether it is what scaled_dot_product_attention computes, but for the window."""
        return self.softcap is None and self.sinks is None

    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        """Softmax over the last dimension: (B, H, G, ..., n) scores, `hidden` true where a key is not seen."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        num_heads, per_head = scores.shape[1:3]
        sinks = self.sinks.view(num_heads, per_head, *[1] * (scores.ndim - 3)).to(scores.dtype)
        with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        return with_sinks.softmax(-1, dtype=torch.float32)[..., :-1].to(scores.dtype)


@dataclass(slots=True)
class PrefillStep:
    """Prompts that go into their slots: right-padded, and all behind the same prefix.

    Padding stands behind the last real token, so no real query sees it.
    """

    prompts: SlotCache
    slots: Tensor
    """(B,) int64, where each prompt goes."""
    prefix: SlotCache | None
    """One slot with the tokens before the ones that are computed now; None where there are none."""
    prefix_length: int
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def attend(self, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, Q, L, D), (B, H, L, D) twice -> (B, Q, L, D)."""
        if self.prefix is not None:
            before = (held[:, :, : self.prefix_length] for held in self.prefix.layer(call.layer))
            key, value = (
                torch.cat([held.expand(len(new), -1, -1, -1), new], dim=2)
                for held, new in zip(before, (key, value), strict=True)
            )
        self.prompts.write_front(call.layer, self.slots, key, value)
        if not call.is_plain:
            return self._attend_by_hand(call, query, key, value)
        is_plain = self.prefix is None and (call.window is None or call.window >= query.shape[2])
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_plain else self._mask(call.window, query),
            is_causal=is_plain,
            scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _attend_by_hand(self, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = query.unflatten(1, (key.shape[1], -1)) * call.scale  # (B, H, G, L, D)
        scores = queries @ key.unsqueeze(2).transpose(-1, -2)  # (B, H, G, L, P)
        weights = call.weights(scores, ~self._mask(call.window, query))
        return (weights @ value.unsqueeze(2)).flatten(1, 2)

    def _mask(self, window: int | None, query: Tensor) -> Tensor:
        """(L, prefix + L) bool, true where a query sees a key."""
        length = query.shape[2]
        if (window, length) not in self._masks:
            keys = torch.arange(self.prefix_length + length, device=query.device)
            queries = keys[self.prefix_length :].unsqueeze(-1)
            visible = keys <= queries
            self._masks[window, length] = visible if window is None else visible & (keys > queries - window)
        return self._masks[window, length]


@dataclass(slots=True)
class DecodeStep:
    """One token of each of B samples. Samples stand in the first slots of `own`, prompts in the first of `prompts`."""

    prompts: SlotCache
    own: SlotCache
    prompt_lengths: Tensor
    """(B,) int64, tokens of each sample's prompt."""
    columns: Tensor
    """(B,) int64, own tokens that each sample holds already: the column that this step's token goes to."""
    samples: Tensor
    """(J, M) int64, the samples of each prompt; places without one name any."""
    places: Tensor
    """(B,) int64, where each sample stands in the flattened `samples`."""
    prompt_columns: int
    """Tokens of the longest prompt."""
    own_columns: int
    """Own tokens of the longest sample, with this step's."""
    is_even: bool
    """Whether all prompts are as long as the longest and all samples as far as the farthest: nothing is padded."""
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def attend(self, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(B, Q, 1, D), (B, H, 1, D) twice -> (B, Q, 1, D)."""
        num_samples, num_heads = key.shape[:2]
        own_rows = torch.arange(num_samples, device=key.device)
        self.own.write(call.layer, own_rows, self.columns, key[:, :, 0], value[:, :, 0])
        own_keys, own_values = (
            held[:num_samples, :, : self.own_columns] for held in self.own.layer(call.layer)
        )  # (B, H, T, D)
        prompt_keys, prompt_values = (
            held[: len(self.samples), :, : self.prompt_columns] for held in self.prompts.layer(call.layer)
        )  # (J, H, P, D)

        queries = query.view(num_samples, num_heads, -1, query.shape[-1]) * call.scale  # (B, H, G, D)
        prompt_scores = self._by_sample(self._by_prompt(queries) @ prompt_keys.transpose(-1, -2))  # (B, H, G, P)
        own_scores = queries @ own_keys.transpose(-1, -2)  # (B, H, G, T)
        scores = torch.cat([prompt_scores, own_scores], dim=-1)
        weights = call.weights(scores, self._mask(call.window))  # (B, H, G, P + T)
        of_prompt, of_own = weights.split([self.prompt_columns, self.own_columns], dim=-1)
        output = self._by_sample(self._by_prompt(of_prompt) @ prompt_values) + of_own @ own_values  # (B, H, G, D)
        return output.view(num_samples, -1, 1, output.shape[-1])

    def _by_prompt(self, rows: Tensor) -> Tensor:
        """(B, H, G, n) -> (J, H, M * G, n)."""
        return rows[self.samples].transpose(1, 2).flatten(2, 3)

    def _by_sample(self, rows: Tensor) -> Tensor:
        """(J, H, M * G, n) -> (B, H, G, n)."""
        num_prompts, most = self.samples.shape
        apart = rows.unflatten(2, (most, -1)).transpose(1, 2)  # (J, M, H, G, n)
        return apart.reshape(num_prompts * most, *apart.shape[2:])[self.places]

    def _mask(self, window: int | None) -> Tensor | None:
        """(B, 1, 1, P + T) bool, true where a sample does not see a key; None where all see all."""
        if window is not None and window >= self.prompt_columns + self.own_columns:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if window is None and self.is_even:
            return None
        device = self.columns.device
        lengths, columns = self.prompt_lengths.unsqueeze(-1), self.columns.unsqueeze(-1)  # (B, 1)
        of_prompt = torch.arange(self.prompt_columns, device=device)
        of_own = torch.arange(self.own_columns, device=device)
        hidden = torch.cat([of_prompt >= lengths, of_own > columns], dim=-1)  # (B, P + T)
        if window is not None:
            positions = torch.cat([of_prompt.expand(len(lengths), -1), lengths + of_own], dim=-1)
            hidden |= positions <= lengths + columns - window
        return hidden[:, None, None]


def decode_step(
    prompts: SlotCache,
    own: SlotCache,
    *,
    prompt_lengths: Sequence[int],
    slots: Sequence[int],
    columns: Sequence[int],
    device: torch.device,
) -> DecodeStep:
    """A step for samples given by the length and the slot of their prompt and the number of own tokens they hold."""
    members: list[list[int]] = [[] for _ in range(max(slots) + 1)]
    places = []
    for row, slot in enumerate(slots):
        places.append((slot, len(members[slot])))
        members[slot].append(row)
    most = max(map(len, members))
    padded = [rows + [0] * (most - len(rows)) for rows in members]
    return DecodeStep(
        prompts=prompts,
        own=own,
        prompt_lengths=torch.tensor(prompt_lengths, device=device),
        columns=torch.tensor(columns, device=device),
        samples=torch.tensor(padded, device=device),
        places=torch.tensor([slot * most + place for slot, place in places], device=device),
        prompt_columns=max(prompt_lengths),
        own_columns=max(columns) + 1,
        is_even=len(set(prompt_lengths)) == 1 and len(set(columns)) == 1,
    )


_step: ContextVar[PrefillStep | DecodeStep] = ContextVar("step")


def _attention(  # noqa: PLR0917
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: (B, Q, L, D), (B, H, L, D) twice -> (B, L, Q, D)."""
    if position_bias is not None:
        raise NotImplementedError("its attention adds a bias of each pair of positions")
    call = _Call(
        layer=module.layer_idx,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_window(module, sliding_window),
        softcap=softcap,
        sinks=s_aux,
    )
    return _step.get().attend(call, query, key, value).transpose(1, 2).contiguous(), None


def _window(module: Any, given: int | None) -> int | None:
    """What the layer's queries see; some families say it in the config alone."""
    layer_types = getattr(module.config, "layer_types", None)
    if given is None and layer_types is not None and layer_types[module.layer_idx] == "sliding_attention":
        return int(module.config.sliding_window)
    return given


AttentionInterface.register(NAME, _attention)


@contextmanager
def shared_attention(model: PreTrainedModel) -> Iterator[None]:
    """Lets `model` compute its attention here; afterwards it has its own again."""
    own = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def active(step: PrefillStep | DecodeStep) -> Iterator[None]:
    """The step that attention calls of this thread belong to."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def prefill(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    into: SlotCache,
    slots: Sequence[int],
    *,
    prefix: SlotCache | None = None,
    prefix_length: int = 0,
) -> Tensor:
    """Computes prompts, writes their keys and values, and returns the last hidden state of each, (B, hidden size).

    Args:
        model: whose attention is the one of this module.
        prompts: token ids behind the prefix, at least one each.
        into: takes prefix and prompt, from column 0 on.
        slots: slot of each prompt.
        prefix: one slot with the keys and values of the tokens before all of them.
        prefix_length: tokens of it.
    """
    device = model.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids = torch.stack([pad(torch.tensor(prompt), (0, int(lengths.max()) - len(prompt))) for prompt in prompts])
    positions = torch.arange(prefix_length, prefix_length + ids.shape[1], device=device)
    step = PrefillStep(into, torch.tensor(slots, device=device), prefix, prefix_length)
    with active(step):
        hidden = model.get_decoder()(
            input_ids=ids.to(device), position_ids=positions.expand(ids.shape), use_cache=False
        ).last_hidden_state  # (B, L, hidden size)
    return hidden[torch.arange(len(prompts), device=device), lengths - 1]
