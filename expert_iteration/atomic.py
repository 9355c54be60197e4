"""Folders that are either complete or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields a hidden folder beside `target` to write into; on leaving, it is on disk and has the name `target`.

    A folder that has the name already is replaced. If the block raises, what was written is removed and `target` stays
    as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True) as temp:
        written = Path(temp) / "new"
        written.mkdir()
        yield written
        for path in [*written.rglob("*"), written]:
            _fsync(path)
        if target.exists():
            target.rename(Path(temp) / "old")
        written.rename(target)
        _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
