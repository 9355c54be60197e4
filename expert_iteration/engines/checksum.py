"""One checksum for a set of named weights, the same on both sides of a weight sync.

engine side:   weights_checksum(deduplicated_state(engine_model).items())
trainer side:  weights_checksum(deduplicated_state(trained_model).items(), dtype=engine_dtype)
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import xxhash
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 20
"""Elements cast, copied to the host and hashed at a time."""


def canonical_names(model: nn.Module) -> dict[str, str]:
    """For each name of the state dict the first name, in the state dict's order, that has the same memory.

    Tied weights share one canonical name, every other weight is its own. The order follows from the model's class, so
    two copies of a model agree on it.
    """
    names_by_memory: dict[tuple[object, ...], str] = {}
    return {
        name: names_by_memory.setdefault(_memory(name, tensor), name) for name, tensor in model.state_dict().items()
    }


def deduplicated_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under their canonical names: the model's own tensors, without a graph."""
    state = model.state_dict()
    return {name: state[name] for name, canonical in canonical_names(model).items() if name == canonical}


def _memory(name: str, tensor: Tensor) -> tuple[object, ...]:
    """What two tensors have in common exactly if they are one and the same piece of memory."""
    if tensor.numel() == 0:
        return (name,)  # empty tensors all have the address 0
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def weights_checksum(named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """XXH3-128 over names, dtypes, shapes and every bit in its place, whatever the device and the order of the names.

    It is made to catch weights that are stale, incomplete, in the wrong place or damaged, which a hash of 128 bits does
    as surely as a cryptographic one and many times as fast. It is no protection against someone who forges weights.

    Args:
        named_tensors: each name once.
        dtype: what floating-point tensors are cast to first, so that the side that sends can compute what the side
            that receives has to hold; None takes them as they are.

    Raises:
        ValueError: a name comes twice.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise ValueError(f"{name} comes twice")
        tensors[name] = tensor
    # xxhash lets go of Python's lock while it reads, and one core alone does not read as fast as the memory allows.
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        digests = dict(zip(tensors, pool.map(partial(_tensor_digest, dtype=dtype), tensors.values()), strict=True))
    total = xxhash.xxh3_128()
    for name in sorted(digests):
        # Lengths first, so that no other split into name and digest gives the same bytes.
        encoded = name.encode()
        total.update(len(encoded).to_bytes(8, "little") + encoded + digests[name])
    return total.hexdigest()


def _tensor_digest(tensor: Tensor, *, dtype: torch.dtype | None) -> bytes:
    """XXH3-128 of dtype, shape and bytes in row-major order."""
    tensor = tensor.detach()
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    digest = xxhash.xxh3_128(f"{target} {tuple(tensor.shape)} ".encode())
    for chunk in tensor.reshape(-1).split(CHUNK_ELEMENTS):
        digest.update(chunk.to(target).cpu().view(torch.uint8).numpy())
    return digest.digest()
