"""Folders that are either complete or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yields a hidden folder beside `target` to write into; on leaving, it is on disk and has the name `target`.

    A folder that has the name by then is replaced; without `replace` it stays, and what was written is removed: then
    processes that write the same do not pull it away from each other. If the block raises, what was written is removed
    and `target` stays as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True) as temp:
        written = Path(temp) / "new"
        written.mkdir()
        yield written
        for path in [*written.rglob("*"), written]:
            _fsync(path)
        if replace and target.exists():
            target.rename(Path(temp) / "old")
        try:
            written.rename(target)
        except OSError:
            if replace or not target.is_dir():
                raise
        _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
