"""Published weights as a file that every engine replica reads: in shared memory on one host, on a shared disk else.

The newest file stays until the next one is complete, so that a replica that is started again can load what the others
hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from expert_iteration.engines.checksum import weights_checksum
from expert_iteration.errors import WeightSyncError

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One publish: every weight once, under the names of the trained model."""

    path: Path
    version: int
    checksum: str
    """`weights_checksum` of the content."""
    names: tuple[str, ...]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped into memory and not copied."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file is no mapping


class WeightFiles:
    """Writes one file for each publish into `folder`, and holds the newest."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.newest: PublishedFile | None = None

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> tuple[PublishedFile, float]:
        """Writes a file; also returns the share of the weights in [0, 1] that differ from the newest one's (1 for the
        first). It is the newest once `keep` is called with it.

        Raises:
            WeightSyncError: there is no room for it, or it cannot be written.
        """
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(self._folder).free
        if needed > free:
            raise WeightSyncError(
                f"weights of version {version} take {needed / 2**30:.3g} GiB and {self._folder} has {free / 2**30:.3g}"
                " GiB free; name a larger folder in inference_model.weight_folder"
            )
        share = 1.0 if self.newest is None else _changed_share(read_weights(self.newest.path), tensors)
        path = self._folder / f"version_{version:06d}{SUFFIX}"
        try:
            save_file(tensors, path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise WeightSyncError(f"weights of version {version} cannot be written to {path}: {error}") from error
        return PublishedFile(path, version, weights_checksum(tensors.items()), tuple(tensors)), share

    def keep(self, published: PublishedFile) -> None:
        """Makes it the newest, and removes the one before."""
        if self.newest is not None and self.newest.path != published.path:
            self.newest.path.unlink(missing_ok=True)
        self.newest = published

    def close(self) -> None:
        """Removes the folder."""
        self.newest = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _changed_share(old: dict[str, Tensor], new: dict[str, Tensor]) -> float:
    pairs = [(old[name], tensor) for name, tensor in new.items() if name in old]
    changed = sum(int(torch.count_nonzero(before != after)) for before, after in pairs)
    return changed / max(1, sum(before.numel() for before, _ in pairs))
