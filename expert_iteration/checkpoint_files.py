"""What can be told of checkpoints without loading them, and without torch: which there are, which are damaged."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

COMPLETE = "COMPLETE"
"""Name of the file that marks a complete checkpoint: its SHA-256 sums, as `sha256sum --check` reads them."""
METADATA = "metadata.json"


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints below a folder, the highest step first. Incomplete ones are passed over."""
    found = {
        int(match[1]): marker.parent
        for marker in directory.glob(f"checkpoint_*/{COMPLETE}")
        if (match := re.fullmatch(r"checkpoint_(\d{4,})", marker.parent.name))
    }
    return [found[step] for step in sorted(found, reverse=True)]


def latest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step; None where there is none."""
    return next(iter(complete(directory)), None)


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a complete checkpoint; None where they are what was written."""
    try:
        for line in (folder / COMPLETE).read_text(encoding="utf-8").splitlines():
            expected, _, name = line.partition("  ")
            if not (folder / name).is_file():
                return f"{name} is missing"
            if sha256(folder / name) != expected:
                return f"{name} is not what was written"
    except OSError as error:
        return f"cannot be read ({error})"
    return None


def read_metadata(folder: Path) -> dict[str, Any]:
    """metadata.json of a complete checkpoint; empty where it cannot be read."""
    try:
        content = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def prune(directory: Path, keep_last: int | None, keep_best: bool) -> None:
    """Removes all complete checkpoints but the last ones and, with `keep_best`, the one of the highest `score` in its
    metadata; None keeps all."""
    if keep_last is None:
        return
    found = complete(directory)
    kept = set(found[:keep_last])
    scores = {folder: score for folder in found if (score := read_metadata(folder).get("score")) is not None}
    if keep_best and scores:
        kept.add(max(scores, key=scores.__getitem__))
    for folder in found:
        if folder not in kept:
            (folder / COMPLETE).unlink()  # incomplete from here on, should the rest be cut short
            shutil.rmtree(folder)


def sha256(file: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
