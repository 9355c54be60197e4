"""Key-value cache of the sequences that are decoded together, allocated once for prompt and response.

Shapes: B sequences, H key-value heads, C columns (capacity), D head size. The prompts are padded on the left, so that
all sequences write their next token into the same column.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


class DecodeLayer(CacheLayerMixin):
    """Keys and values of one layer. Sliding-window layers keep everything too: the mask leaves out what is too old."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, num_sequences: int, prompt_columns: int, capacity: int) -> None:
        super().__init__()
        self.num_sequences = num_sequences
        self.length = prompt_columns
        self.capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates (B, H, C, D); heads and sizes are those of the given (_, H, _, D)."""
        # Zeros and not just any memory: padding has the attention weight 0, and 0 times NaN is NaN.
        self.keys, self.values = (
            states.new_zeros(self.num_sequences, states.shape[1], self.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def write_prompts(self, first: int, keys: Tensor, values: Tensor, source: Tensor) -> None:
        """Copies prompt source[i] to sequence first + i; the prompts, (n, H, P, D), end where all prompts end."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        rows = slice(first, first + len(source))
        columns = slice(self.length - keys.shape[2], self.length)
        self.keys[rows, :, columns] = keys[source]
        self.values[rows, :, columns] = values[source]

    def keep(self, rows: Tensor) -> None:
        """Drops all sequences but `rows`."""
        self.keys, self.values = self.keys[rows], self.values[rows]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends (B, H, 1, D) to each sequence and returns everything so far, without a copy."""
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class DecodeCache(Cache):
    """One DecodeLayer per layer of the model."""

    def __init__(self, num_layers: int, num_sequences: int, prompt_columns: int, capacity: int) -> None:
        self._layers = [DecodeLayer(num_sequences, prompt_columns, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._layers))

    def write_prompts(self, first: int, prompts: DynamicCache, source: Tensor) -> None:
        """Gives sequence first + i the keys and values of prompt source[i], in every layer."""
        for layer, prefilled in zip(self._layers, prompts.layers, strict=True):
            assert isinstance(prefilled, CacheLayerMixin)
            assert prefilled.keys is not None
            assert prefilled.values is not None
            layer.write_prompts(first, prefilled.keys, prefilled.values, source)

    def keep(self, rows: Tensor) -> None:
        """Drops all sequences but `rows`."""
        for layer in self._layers:
            layer.keep(rows)
