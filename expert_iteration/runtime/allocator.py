"""How this process keeps memory that it has freed."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""
NEVER = 2**31 - 1
TOP_PAD_BYTES = 2**26


def keep_freed_memory() -> bool:
    """Lets malloc reuse freed memory instead of handing it back to the system; false where it is not glibc's malloc.

    By default glibc gives large blocks back as soon as they are freed, and the next tensor of that size is taken from
    the system and filled with zeros page by page: in a training step on the CPU that was a fifth of the time. The peak
    of resident memory stays about what it was; what is between the peaks is kept.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: NEVER, M_TOP_PAD: TOP_PAD_BYTES}
    taken = [mallopt(parameter, value) for parameter, value in settings.items()]  # 1 where it is
    return all(taken)
