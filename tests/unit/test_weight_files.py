"""Published weights as files: what is written, what is kept, what goes wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from expert_iteration.engines.checksum import weights_checksum
from expert_iteration.engines.weight_files import WeightFiles, read_weights
from expert_iteration.errors import WeightSyncError

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_a_file_holds_every_bit_under_its_name(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path / "weights")
    transposed = WEIGHTS | {"a.weight": WEIGHTS["a.weight"].T}  # not contiguous
    published, share = files.write(transposed.items(), 3)
    assert (published.version, published.names, share) == (3, ("a.weight", "b"), 1.0)
    read = read_weights(published.path)
    assert published.checksum == weights_checksum(read.items()) == weights_checksum(transposed.items())
    assert torch.equal(read["a.weight"], WEIGHTS["a.weight"].T)
    assert read["b"].dtype == torch.bfloat16


def test_the_newest_stays_until_the_next_is_kept(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path / "weights")
    first, _ = files.write(WEIGHTS.items(), 0)
    files.keep(first)
    changed = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    changed["b"][:2] = 5
    second, share = files.write(changed.items(), 1)
    assert share == 2 / 10
    assert first.path.exists() and second.path.exists()
    files.keep(second)
    assert not first.path.exists() and second.path.exists()
    files.close()
    assert not (tmp_path / "weights").exists()


def test_no_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = WeightFiles(tmp_path / "weights")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=31))
    with pytest.raises(WeightSyncError, match=r"inference_model\.weight_folder"):
        files.write(WEIGHTS.items(), 0)  # 24 + 8 bytes
    assert list((tmp_path / "weights").iterdir()) == []
