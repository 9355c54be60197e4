"""The script, stopped and started again. Run: pytest tests/integration/test_stop_and_go_on.py"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import torture
from expert_iteration.checkpoint_files import complete
from tests.integration.test_script import finish, start

ENDLESS = (
    "train.total_dialog_turns=1000000",
    "eval.at_start=false",
    "optimizer.scheduler.enabled=false",
    "optimizer.lr=1e-6",
)


@pytest.fixture
def launch(overrides: list[str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the same command line each time."""
    processes: list[subprocess.Popen[str]] = []

    def launch(*more: str) -> subprocess.Popen[str]:
        processes.append(start([*overrides, *ENDLESS, "resume=auto", *more], tmp_path))
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()
        process.wait()


def steps_in(folder: Path) -> list[int]:
    logs = list(folder.glob("outputs/*/*/metrics.jsonl"))
    assert len(logs) <= 1, "the run went on in another folder"
    # The last line may be in the middle of being written.
    lines = [line for log in logs for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [record["progress/optimizer_step"] for record in records if record["kind"] == "step"]


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    while not (steps := steps_in(folder)) or steps[-1] < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_the_same_command_goes_on_after_signals(launch: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    first = launch()
    wait_for_step(first, tmp_path, 3)
    first.send_signal(signal.SIGTERM)
    status, out, err = finish(first)
    assert (status, err) == (143, "")
    last = steps_in(tmp_path)[-1]
    [run_dir] = tmp_path.glob("outputs/*/*")
    assert complete(run_dir / "checkpoints")[0].name == f"checkpoint_{last:04d}"
    assert f"checkpoint_{last:04d}" in out

    third = launch()
    wait_for_step(third, tmp_path, last + 3)
    status, _, err = finish(launch())  # a second process on the same folder
    assert status == 2
    assert "another process works in this folder" in err
    third.send_signal(signal.SIGINT)
    assert finish(third)[0] == 130
    steps = steps_in(tmp_path)
    assert steps == list(range(1, steps[-1] + 1))

    status, out, err = finish(launch("train.max_time=0.5"))
    assert (status, err) == (124, "")
    assert f"Goes on from {run_dir / 'checkpoints' / f'checkpoint_{steps[-1]:04d}'}" in out


def test_the_same_command_begins_again_after_a_kill_before_the_first_checkpoint(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder = f"hydra.run.dir={tmp_path / 'outputs' / 'day' / 'run'}"
    first = launch(folder)
    wait_for_step(first, tmp_path, 1)
    first.kill()
    first.wait()
    status, out, err = finish(launch(folder, "train.total_dialog_turns=128", "eval.at_end=false"))
    assert (status, err) == (0, "")
    assert "begins again; its logs are in" in out
    assert steps_in(tmp_path)[0] == 1
    [aside] = tmp_path.glob("outputs/day/run/cut_short_*")
    assert (aside / "metrics.jsonl").stat().st_size > 0


def test_another_config_is_refused_before_anything_loads(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    first = launch()
    wait_for_step(first, tmp_path, 1)
    first.send_signal(signal.SIGTERM)
    finish(first)
    status, _, err = finish(launch("train.topk_size=3"))
    assert status == 2
    assert "train.topk_size=3: the run that is resumed has 4" in err
    [run_dir] = tmp_path.glob("outputs/*/*")
    assert "topk_size: 4" in (run_dir / ".hydra" / "config.yaml").read_text()


def test_EI_37_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    assert torture.main(["--tiny", "--kills", "4", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert sum(figures["kills"].values()) == 4
    assert figures["bytes_of_weights_that_differ"] == 0
    assert figures["checkpoints_checked"] > 0
