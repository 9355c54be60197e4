"""Keys and values in slots of equal size, one tensor of each per layer.

Shapes: S slots, H key-value heads, C columns of a slot, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """Preallocated keys and values of every layer: (S, H, C, D) each.

    A layer is allocated when it is first written, since heads and sizes are those of what is written. Slots in use are
    kept at the front, so that a step works on a view and copies nothing.
    """

    def __init__(self, num_slots: int, num_columns: int) -> None:
        self._num_slots = num_slots
        self._num_columns = num_columns
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has been written: (S, H, C, D) each."""
        return self._layers[index]

    def write(self, index: int, slots: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts one token into each slot: (n,) slots, (n,) columns, (n, H, D) keys and values."""
        held_keys, held_values = self._allocated(index, keys, values)
        held_keys[slots, :, columns] = keys
        held_values[slots, :, columns] = values

    def write_front(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts tokens into the first columns of slots: (n,) slots, (n, H, L, D) keys and values."""
        held_keys, held_values = self._allocated(index, keys[:, :, 0], values[:, :, 0])
        held_keys[slots, :, : keys.shape[2]] = keys
        held_values[slots, :, : values.shape[2]] = values

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slot sources[i] to slot targets[i]: (n,) each, and none is both."""
        for keys, values in self._layers.values():
            keys[targets] = keys[sources]
            values[targets] = values[sources]

    def _allocated(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer, made with the heads and sizes of (_, H, D) keys and values where it is not there yet."""
        if index not in self._layers:
            # Zeros and not just any memory: what is masked has the attention weight 0, and 0 times NaN is NaN.
            made_keys, made_values = (
                torch.zeros(
                    self._num_slots,
                    like.shape[1],
                    self._num_columns,
                    like.shape[2],
                    dtype=like.dtype,
                    device=like.device,
                )
                for like in (keys, values)
            )
            self._layers[index] = made_keys, made_values
        return self._layers[index]
