"""Seeds that follow from the run's one seed."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) from numbers and names, the same in every process and on every machine.

    Two uses that differ in any part get unrelated streams: derive_seed(seed, "sample", row_id, epoch, index).
    """
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
