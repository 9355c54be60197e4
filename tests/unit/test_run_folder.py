"""Logs that are cut back, and one process at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from expert_iteration import run_folder
from expert_iteration.errors import UserError
from expert_iteration.run_folder import claim, remove_leftovers, trim

LINES = (
    '{"kind": "collector", "progress/collection": 0}\n',
    '{"kind": "collection", "progress/collection": 0}\n',
    '{"kind": "collector", "progress/collection": 1}\n',
    '{"kind": "step", "progress/collection": 0}\n',
    '{"kind": "step", "progress/collection": 0}\n',
    '{"kind": "step", "progr',  # cut short by a kill
)


def test_what_came_after_a_checkpoint_leaves_the_logs(tmp_path: Path) -> None:
    """Taken after the first step, when the second collection was logged and not stored."""
    (tmp_path / "metrics.jsonl").write_text("".join(LINES))
    (tmp_path / "samples.jsonl").write_text("one\ntwo\n")
    trim(tmp_path, metrics_bytes=len("".join(LINES[:4])), samples_bytes=4, collections=1)
    assert (tmp_path / "metrics.jsonl").read_text() == LINES[0] + LINES[1] + LINES[3]
    assert (tmp_path / "samples.jsonl").read_text() == "one\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_logs_without_samples_are_fine(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(LINES[3])
    trim(tmp_path, metrics_bytes=10**6, samples_bytes=0, collections=0)
    assert (tmp_path / "metrics.jsonl").read_text() == LINES[3]


def test_another_process_in_the_folder_is_told_and_its_end_frees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import pathlib, sys, time; from expert_iteration.run_folder import claim;"
        "lock = claim(pathlib.Path(sys.argv[1]), resumed=False); print('claimed', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "claimed\n"
    monkeypatch.setattr(run_folder, "LOCK_LIMIT_S", 0.1)
    with pytest.raises(UserError, match="another process works in this folder"):
        claim(tmp_path, resumed=True)
    other.kill()
    other.wait()
    claim(tmp_path, resumed=True).release()
    with pytest.raises(UserError, match="another run has written to this folder"):
        claim(tmp_path, resumed=False)


def test_a_run_that_was_cut_short_before_its_first_checkpoint_begins_again_and_its_logs_stay(tmp_path: Path) -> None:
    for number in (1, 2):
        claim(tmp_path, resumed=False, may_begin_again=True).release()
        (tmp_path / "metrics.jsonl").write_text(f"run {number}\n")
        (tmp_path / "samples.jsonl").write_text(f"samples {number}\n")
    claim(tmp_path, resumed=False, may_begin_again=True).release()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "samples.jsonl").exists()
    assert (tmp_path / "cut_short_1" / "metrics.jsonl").read_text() == "run 1\n"
    assert (tmp_path / "cut_short_2" / "samples.jsonl").read_text() == "samples 2\n"
    (tmp_path / "FINISHED").touch()
    with pytest.raises(UserError, match="another run has written to this folder"):
        claim(tmp_path, resumed=False, may_begin_again=True)


def test_what_a_kill_in_a_save_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint_0003-abc" / "new").mkdir(parents=True)
    (tmp_path / "checkpoint_0002").mkdir()
    remove_leftovers(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint_0002"]
