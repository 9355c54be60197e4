"""Peak memory of the process or the GPU."""

from __future__ import annotations

import resource
import sys

import torch

_GIB = 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far, in GiB: resident in this process on the CPU, allocated by torch on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2): bytes on macOS, KiB on Linux.
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB
