"""Freed memory is kept: a second tensor of the same size costs no page faults. In a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from expert_iteration.runtime.allocator import keep_freed_memory

def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    assert keep_freed_memory()
def allocate():
    for size in (24, 23, 25):  # 64, 32 and 128 MiB, in pages of 4 KiB
        torch.ones(2**size)

for _ in range(10):  # aligned blocks creep through the heap at first
    allocate()
before = faults()
for _ in range(10):
    allocate()
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_memory_is_used_again() -> None:
    counts = {
        mode: int(subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, check=True).stdout)
        for mode in ("keep", "default")
    }
    assert counts["default"] > 10 * 2**15  # the largest block, each time
    assert counts["keep"] < counts["default"] / 4
