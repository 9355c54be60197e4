"""Slots of keys and values, on tensors small enough to write out."""

from __future__ import annotations

import torch

from expert_iteration.engines.slot_cache import SlotCache


def states(*values: float) -> torch.Tensor:
    """One head of size 1: (n, 1, 1)."""
    return torch.tensor(values).view(-1, 1, 1)


def held(cache: SlotCache, layer: int = 0) -> tuple[list[list[float]], list[list[float]]]:
    keys, values = cache.layer(layer)
    return keys[:, 0, :, 0].tolist(), values[:, 0, :, 0].tolist()


def test_tokens_go_to_their_slots_and_columns() -> None:
    cache = SlotCache(num_slots=3, num_columns=2)
    cache.write(0, torch.tensor([0, 2]), torch.tensor([1, 0]), states(1, 2), states(-1, -2))
    assert held(cache) == ([[0, 1], [0, 0], [2, 0]], [[0, -1], [0, 0], [-2, 0]])


def test_prompts_fill_the_front_of_their_slots() -> None:
    cache = SlotCache(num_slots=3, num_columns=3)
    prompts = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 2, 1)
    cache.write_front(0, torch.tensor([2, 0]), prompts, -prompts)
    assert held(cache)[0] == [[3, 4, 0], [0, 0, 0], [1, 2, 0]]


def test_moving_copies_every_layer() -> None:
    cache = SlotCache(num_slots=3, num_columns=1)
    for layer in (0, 1):
        cache.write(layer, torch.arange(3), torch.zeros(3, dtype=torch.int64), states(1, 2, 3), states(4, 5, 6))
    cache.move(torch.tensor([2]), torch.tensor([0]))
    assert held(cache, 0) == held(cache, 1) == ([[3], [2], [3]], [[6], [5], [6]])
