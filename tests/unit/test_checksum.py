"""The weights' checksum sees every bit in its place and nothing else."""

from __future__ import annotations

import pytest
import torch
import xxhash
from torch import Tensor, nn

from expert_iteration.engines import checksum
from expert_iteration.engines.checksum import canonical_names, deduplicated_state, weights_checksum


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 4, generator=generator),
        "b": torch.randn(3, 4, generator=generator),
        "steps": torch.tensor([1, 2, 3]),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.0),
    }


def value(state: dict[str, Tensor], dtype: torch.dtype | None = None) -> str:
    return weights_checksum(state.items(), dtype)


def test_by_hand_for_one_tensor() -> None:
    content = xxhash.xxh3_128(b"torch.float32 (2,) " + bytes.fromhex("0000803f 00000040")).digest()  # 1.0, 2.0
    expected = xxhash.xxh3_128((1).to_bytes(8, "little") + b"w" + content).hexdigest()
    assert weights_checksum([("w", torch.tensor([1.0, 2.0]))]) == expected


def test_same_weights_same_checksum_whatever_the_order_and_the_memory_layout() -> None:
    state = weights()
    expected = value(state)
    assert value(weights()) == expected
    assert value(dict(reversed(state.items()))) == expected
    assert value({**state, "a": state["a"].t().contiguous().t()}) == expected
    assert value({name: nn.Parameter(t) if t.is_floating_point() else t for name, t in state.items()}) == expected


def test_swapping_two_elements_changes_it() -> None:
    changed = weights()
    changed["a"].view(-1)[[0, 5]] = changed["a"].view(-1)[[5, 0]]
    assert value(changed) != value(weights())


def test_swapping_two_tensors_of_one_shape_changes_it() -> None:
    state = weights()
    assert value({**state, "a": state["b"], "b": state["a"]}) != value(state)


@pytest.mark.parametrize("bit", [0, 1, 30])
@pytest.mark.parametrize("element", [0, 11])
def test_flipping_one_bit_changes_it(element: int, bit: int) -> None:
    changed = weights()
    changed["a"].view(torch.int32).view(-1)[element] ^= 1 << bit
    assert value(changed) != value(weights())


def test_signs_of_zero_and_payloads_of_nan_count() -> None:
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert quiet.isnan().all()
    assert other.isnan().all()
    values = [torch.tensor([0.0]), torch.tensor([-0.0]), quiet, other]
    assert len({weights_checksum([("w", tensor)]) for tensor in values}) == 4


def test_names_shapes_and_dtypes_count() -> None:
    tensor = torch.zeros(2, 3)
    variants = [
        [("w", tensor)],
        [("v", tensor)],
        [("w", tensor.view(3, 2))],
        [("w", tensor.view(6))],
        [("w", tensor.view(torch.int32))],
        [("w", tensor), ("x", torch.empty(0))],
        [("w", tensor), ("x", torch.empty(0, 2))],
        [],
    ]
    assert len({weights_checksum(variant) for variant in variants}) == len(variants)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = value(weights())
    monkeypatch.setattr(checksum, "CHUNK_ELEMENTS", 5)
    assert value(weights()) == expected


def test_dtype_is_what_the_receiver_holds_after_a_cast() -> None:
    state = weights()
    received = {name: t.bfloat16() if t.is_floating_point() else t for name, t in state.items()}
    assert value(state, torch.bfloat16) == value(received)
    assert value(state, torch.bfloat16) != value(state)
    assert value(state, torch.float32) == value(state)


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="w comes twice"):
        weights_checksum([("w", torch.zeros(1)), ("w", torch.zeros(1))])


class Tied(nn.Module):
    """Two names for one weight, a persistent and a passing buffer, two empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("empty_1", torch.empty(0))
        self.register_buffer("empty_2", torch.empty(0))


def test_deduplicated_state_has_each_piece_of_memory_once() -> None:
    model = Tied()
    state = deduplicated_state(model)
    assert sorted(state) == ["embedding.weight", "empty_1", "empty_2", "scale"]
    assert state["embedding.weight"].data_ptr() == model.head.weight.data_ptr()
    assert not state["embedding.weight"].requires_grad
    assert canonical_names(model)["head.weight"] == "embedding.weight"
    assert canonical_names(model)["empty_2"] == "empty_2"
