"""The entry script as a user starts it: exit statuses, signals, files. Run: pytest tests/integration/test_script.py"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "expert-iteration-sync.py"


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "mode=sync", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,  # noqa: PLW1509  # this process has no threads that hold locks
    )


def default_signals() -> None:
    """Signals as a shell leaves them to a command; a job in the background would inherit that some are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def records(folder: Path) -> list[dict]:
    (log,) = folder.glob("outputs/*/*/metrics.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_run_ends_with_0_and_shows_before_and_after(overrides, tmp_path):
    status, out, err = finish(start(overrides, tmp_path))
    assert status == 0, err
    assert err == ""
    assert "Held-out accuracy, greedy" in out
    assert "Paired test (exact McNemar)" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    (run_dir,) = tmp_path.glob("outputs/*/*")
    assert (run_dir / ".hydra" / "config.yaml").is_file()
    assert {"step", "collection", "collector", "eval"} == {record["kind"] for record in records(tmp_path)}


@pytest.mark.parametrize(
    ("number", "status", "more"),
    [
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, ["train.sync_iter=false"]),
        (signal.SIGHUP, 129, []),
    ],
)
def test_a_signal_ends_the_run_cleanly_with_its_log_intact(overrides, tmp_path, number, status, more):
    process = start([*overrides, "train.total_dialog_turns=1000000", *more], tmp_path)
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and process.poll() is None:
        logs = list(tmp_path.glob("outputs/*/*/metrics.jsonl"))
        if logs and '"kind": "step"' in logs[0].read_text():
            break
        time.sleep(0.2)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == status, err
    assert "Traceback" not in err
    kinds = [record["kind"] for record in records(tmp_path)]
    assert kinds[0] == "eval" and "step" in kinds
    # What was trained until then is saved, and the plots are there.
    (run_dir,) = tmp_path.glob("outputs/*/*")
    assert list((run_dir / "checkpoints").glob("checkpoint_*/COMPLETE"))
    assert (run_dir / "reward.png").is_file()


def test_a_component_that_fails_ends_with_3_and_its_own_traceback(overrides, tmp_path):
    # A rate that no run survives: the first step makes the weights useless, the second one's loss is not finite.
    status, _, err = finish(start([*overrides, "optimizer.lr=1e38", "optimizer.scheduler.enabled=false"], tmp_path))
    assert status == 3
    assert "Traceback" in err and "ComponentError" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["mode=async"], ["mode=async", "mode=sync"]),
        (["train.topk_sise=4"], ["train.topk_sise", "train.topk_size"]),
        (["train.topk_size=64"], ["train.topk_size=64", "env.repeats"]),
        (["model.name=./no/such/model"], ["model.name"]),
        (["env.data_path=/no/such/data"], ["env.data_path"]),
        (["env.expert_data=/no/such/file"], ["env.expert_data=/no/such/file"]),
        (["optimizer.lr=nan", "train.epochs=x", "+train.lrr=1"], ["optimizer.lr", "train.epochs", "train.lrr"]),
    ],
)
def test_bad_input_ends_with_2_and_says_what_to_do(overrides, tmp_path, arguments, expected):
    status, out, err = finish(start([*overrides, *arguments], tmp_path))
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    for text in expected:
        assert text in err


@pytest.mark.parametrize(
    ("line", "expected"),
    [("{not json", "train.jsonl"), ('{"question": "3"}', "answer"), ('{"question": "3", "answer": "three"}', "number")],
)
def test_bad_rows_are_named(overrides, tmp_path, line, expected):
    data = tmp_path / "data"
    data.mkdir()
    good = '{"question": "3", "answer": "#### 3"}'
    (data / "train.jsonl").write_text(f"{good}\n{line}\n")
    (data / "test.jsonl").write_text('{"question": "5", "answer": "#### 5"}\n')
    status, _, err = finish(start([*overrides, f"env.data_path={data}"], tmp_path))
    assert status == 2
    assert expected in err and "2" in err


def test_two_runs_never_write_to_one_folder(overrides, tmp_path):
    run_dir = f"hydra.run.dir={tmp_path / 'same'}"
    first = start([*overrides, run_dir, "eval.at_start=false", "eval.at_end=false"], tmp_path)
    assert finish(first)[0] == 0
    status, _, err = finish(start([*overrides, run_dir], tmp_path))
    assert status == 2
    assert "another run has written to this folder" in err


def test_a_sweep_goes_on_after_a_failed_job_and_ends_with_the_worst_status(overrides, tmp_path):
    arguments = [*overrides, "--multirun", "train.topk_size=64,2", "eval.at_start=false", "eval.at_end=false"]
    status, _, err = finish(start(arguments, tmp_path))
    assert status == 2
    assert "train.topk_size=64" in err
    assert len(list(tmp_path.glob("multirun/*/*/1/metrics.jsonl"))) == 1
