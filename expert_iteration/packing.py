"""Several sequences in one row of a batch, so that little is padded, and what several begin with stands there once.

    sequences  S P a a    S P b b b    S Q c      (a system prompt S, questions P and Q, responses a, b, c)
    row        S P a a b b b Q c                  b sees S, P and b, never a; c sees S, Q and c; positions are those
                                                  that a token has in its own sequence

A token attends to the tokens before it in its own segment, to its prompt and to what all prompts of the batch begin
with: the mask below is block-diagonal but for these, so every sequence has the log-probs that it has alone.

Shapes: B sequences of T tokens padded on the right, R packed rows of W columns, N tokens that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ATTENTION_BREAK_EVEN = 4096
"""Width at which attention over a row costs as much as the matrix products of its tokens: 2 * parameters / (4 * hidden
size * layers), 3900 for a model of 135M parameters and more for larger ones."""
MAX_MASK_ELEMENTS = 2**28
"""Rows are not made wider than the longest sequence where the mask would then have more elements than this."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A batch as the model sees it, and where the answers stand in it."""

    token_ids: Tensor
    """(R, W) int64, 0 behind the last token of a row."""
    position_ids: Tensor
    """(R, W) int64, position of each token in its own sequence."""
    attention_mask: Tensor
    """(R, 1, W, W) bool, true where the query may look at the key; every query sees itself."""
    predictors: Tensor
    """(N,) int64, place in the flattened (R, W) of the token before each one that is asked for."""


@dataclass(slots=True)
class _Item:
    """A prompt and the sequences that go on from it, without what all prompts begin with."""

    prompt_length: int
    """With it."""
    sequences: list[int]
    length: int
    """Columns that it takes."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which items stand in which row."""

    rows: list[list[_Item]]
    width: int
    common: int
    """Tokens that all prompts begin with; every row does too."""

    @property
    def cost(self) -> int:
        """Of a forward pass, in tokens times width."""
        return len(self.rows) * self.width * (ATTENTION_BREAK_EVEN + self.width)

    @property
    def mask_elements(self) -> int:
        return len(self.rows) * self.width**2


def pack(token_ids: Tensor, mask: Tensor, attention_mask: Tensor) -> PackedRows:
    """Packs a batch; `predictors` follows the true elements of `mask` in row-major order.

    What stands before the first token that is asked for is the prompt; sequences with equal prompts share it, and all
    share what all prompts begin with.

    Args:
        token_ids: (B, T).
        mask: (B, T) bool, the tokens that are asked for: at least one in each sequence, and never the first.
        attention_mask: (B, T) bool, true on the sequence, which starts in the first column.
    """
    lengths = attention_mask.sum(-1).tolist()
    prompt_lengths = mask.to(torch.uint8).argmax(-1).tolist()
    ids = token_ids.tolist()
    prompts: dict[tuple[int, ...], list[int]] = {}
    for sequence, row in enumerate(ids):
        prompts.setdefault(tuple(row[: prompt_lengths[sequence]]), []).append(sequence)
    groups = [(len(prompt), sequences) for prompt, sequences in prompts.items()]
    layout = _cheapest_layout(groups, lengths, common_length(list(prompts)))
    return _fill(layout, ids, mask.cpu(), lengths, token_ids.device)


def common_length(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with, at least one short of each; 0 for a single prompt."""
    if len(prompts) == 1:
        return 0
    first, last = min(prompts), max(prompts)  # whatever these two share, all in between share
    most = min(map(len, prompts)) - 1
    return next((index for index in range(most) if first[index] != last[index]), most)


def _cheapest_layout(groups: Sequence[tuple[int, Sequence[int]]], lengths: Sequence[int], common: int) -> _Layout:
    """The layout of least estimated work among three widths: wide rows waste little, narrow ones attend to less."""
    longest = max(lengths)
    longest_group = max(prompt + sum(lengths[s] - prompt for s in sequences) for prompt, sequences in groups)
    layouts = [_layout(groups, lengths, common, width) for width in sorted({longest, 2 * longest, longest_group})]
    allowed = [layout for layout in layouts if layout.width == longest or layout.mask_elements <= MAX_MASK_ELEMENTS]
    return min(allowed, key=lambda layout: layout.cost)


def _layout(
    groups: Sequence[tuple[int, Sequence[int]]], lengths: Sequence[int], common: int, max_width: int
) -> _Layout:
    """Items into rows of at most `max_width`: the longest first, each into the first row that has room."""
    most = max_width - common
    items = [item for prompt, sequences in groups for item in _items(prompt, sequences, lengths, common, most)]
    rows: list[list[_Item]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda item: -item.length):
        row = next((row for row, free in enumerate(room) if free >= item.length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(most)
        rows[row].append(item)
        room[row] -= item.length
    return _Layout(rows, max_width - min(room), common)


def _items(prompt: int, sequences: Sequence[int], lengths: Sequence[int], common: int, most: int) -> list[_Item]:
    """The sequences of one prompt, cut where `most` columns are full."""
    items: list[_Item] = []
    for sequence in sequences:
        own = lengths[sequence] - prompt
        if not items or items[-1].length + own > most:
            items.append(_Item(prompt, [], prompt - common))
        items[-1].sequences.append(sequence)
        items[-1].length += own
    return items


def _fill(
    layout: _Layout, ids: Sequence[Sequence[int]], mask: Tensor, lengths: Sequence[int], device: torch.device
) -> PackedRows:
    """The tensors of a layout, built on the CPU; `mask` is (B, T)."""
    num_rows, width, common = len(layout.rows), layout.width, layout.common
    token_ids, position_ids = torch.zeros(2, num_rows, width, dtype=torch.int64)
    # Each column of padding is a segment of its own: attention over no key at all would be NaN.
    segments = (-1 - torch.arange(width)).repeat(num_rows, 1)  # (R, W)
    prompts = segments.clone()  # (R, W), segment of each token's prompt
    predictors: dict[int, Tensor] = {}
    next_segment = 0
    for row, items in enumerate(layout.rows):
        token_ids[row, :common] = torch.tensor(ids[items[0].sequences[0]][:common], dtype=torch.int64)
        position_ids[row, :common] = torch.arange(common)
        column = common
        for item in items:
            prompt_segment, prompt_end = next_segment, column + item.prompt_length - common
            pieces = [(ids[item.sequences[0]], common, item.prompt_length)]
            pieces += [(ids[sequence], item.prompt_length, lengths[sequence]) for sequence in item.sequences]
            for sequence, (tokens, start, stop) in zip([None, *item.sequences], pieces, strict=True):
                columns = slice(column, column + stop - start)
                token_ids[row, columns] = torch.tensor(tokens[start:stop], dtype=torch.int64)
                position_ids[row, columns] = torch.arange(start, stop)
                segments[row, columns], prompts[row, columns] = next_segment, prompt_segment
                if sequence is not None:
                    asked = mask[sequence].nonzero().squeeze(-1)  # the first is `start`, which the prompt predicts
                    places = torch.where(asked == start, prompt_end - 1, column + asked - start - 1)
                    predictors[sequence] = row * width + places
                column, next_segment = columns.stop, next_segment + 1
    visible = segments.unsqueeze(-1) == segments.unsqueeze(-2)  # (R, W, W), its own segment
    visible |= prompts.unsqueeze(-1) == segments.unsqueeze(-2)
    visible[:, :, :common] = True
    flat = torch.cat([predictors[sequence] for sequence in range(len(ids))])
    attention_mask = visible.tril().unsqueeze(1)
    return PackedRows(token_ids.to(device), position_ids.to(device), attention_mask.to(device), flat.to(device))
