"""Where records go: metrics.jsonl in full, terminal and wandb thinned, and a wandb that fails."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import wandb

from expert_iteration.metrics.glossary import GLOSSARY
from expert_iteration.metrics.logger import MetricsLogger
from expert_iteration.metrics.sinks import WandbRun, read_records
from expert_iteration.metrics.terminal import make_terminal


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def make_logger(
    path: Path, *, frequency: int = 1, wandb_run: WandbRun | None = None
) -> tuple[MetricsLogger, io.StringIO]:
    output = io.StringIO()
    terminal = make_terminal("plain", output)
    return MetricsLogger(path, terminal=terminal, wandb_run=wandb_run, logging_frequency=frequency), output


def test_every_record_is_one_line_that_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    logger, _ = make_logger(path, frequency=10)
    with logger:
        logger.log("collection", {"reward/mean": 0.5}, optimizer_step=0, collection=0)
        logger.log("step", {"loss/total": 1.25, "policy/version": 3}, optimizer_step=1, collection=0)
        first, second = lines_of(path)
    assert first["kind"] == "collection" and first["reward/mean"] == 0.5
    assert second["time/elapsed"] >= first["time/elapsed"] >= 0
    del second["time/elapsed"]
    assert second == {
        "kind": "step",
        "progress/optimizer_step": 1,
        "progress/collection": 0,
        "loss/total": 1.25,
        "policy/version": 3,
    }
    assert set(first) - {"kind"} <= GLOSSARY.keys()


def test_values_that_json_does_not_have_become_null_and_are_read_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger, _ = make_logger(path)
    with logger:
        logger.log("step", {"loss/total": nan, "loss/main": inf, "loss/kl_to_ref": 0.5}, optimizer_step=1, collection=0)
    (line,) = lines_of(path)
    assert line["loss/total"] is None and line["loss/main"] is None and line["loss/kl_to_ref"] == 0.5
    (record,) = read_records(path)
    assert record.kind == "step" and math.isnan(record.values["loss/total"]) and record.values["loss/kl_to_ref"] == 0.5


def test_a_name_without_a_glossary_entry_is_refused_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger, output = make_logger(path)
    with logger:
        with pytest.raises(ValueError, match="loss/totl"):
            logger.log("step", {"loss/totl": 1.0}, optimizer_step=1, collection=0)
        with pytest.raises(ValueError, match="time/sleep"), logger.stage("sleep"):
            pass
    assert path.read_text() == "" and output.getvalue() == ""


def test_a_second_log_of_the_same_file_goes_on_below_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with make_logger(path)[0] as logger:
            logger.log("step", {"loss/total": 1.0}, optimizer_step=step, collection=0)
    assert [line["progress/optimizer_step"] for line in lines_of(path)] == [1, 2]


def test_logging_frequency_thins_steps_on_the_terminal_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger, output = make_logger(path, frequency=3)
    with logger:
        logger.log("collection", {"reward/mean": 0.5}, optimizer_step=0, collection=0)
        for step in range(1, 8):
            logger.log("step", {"loss/total": float(step)}, optimizer_step=step, collection=0)
    assert len(lines_of(path)) == 8
    assert output.getvalue().splitlines() == ["[1]  reward 0.500", "  step 3  loss 3.0000", "  step 6  loss 6.0000"]


def test_stage_seconds_add_up_and_are_taken_once(tmp_path: Path) -> None:
    logger, _ = make_logger(tmp_path / "metrics.jsonl")
    with logger:
        for _ in range(2):
            with logger.stage("train"):
                sleep(0.02)
        with pytest.raises(RuntimeError, match="the stage's own error"), logger.stage("publish"):
            raise RuntimeError("the stage's own error")
        seconds = logger.take_stage_seconds()
        assert set(seconds) == {"time/train", "time/publish"}
        assert 0.04 <= seconds["time/train"] < 2
        assert logger.take_stage_seconds() == {}


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    logger, _ = make_logger(tmp_path / "metrics.jsonl")
    logger.close()
    logger.close()


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Real wandb whose files all lie under tmp_path and whose service ends with the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    yield tmp_path / "run"
    wandb.teardown()


def open_wandb(directory: Path, warnings: list[str], run_id: str | None = None) -> WandbRun:
    return WandbRun(
        mode="offline",
        project="tests",
        name="run",
        directory=directory,
        config={"seed": 0},
        warn=warnings.append,
        run_id=run_id,
    )


def test_EI_39_wandb_offline_writes_its_run_and_then_fails_without_stopping_the_training(
    tmp_path: Path, offline_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    wandb_run = open_wandb(offline_wandb, warnings)
    assert wandb_run.active and warnings == []
    real_log = wandb.Run.log
    logged: list[dict[str, float]] = []

    def log(self: wandb.Run, data: dict[str, float], *args: Any) -> None:
        logged.append(data)
        if data["progress/optimizer_step"] == 4:
            raise OSError("disk full")
        real_log(self, data, *args)

    monkeypatch.setattr(wandb.Run, "log", log)
    logger, _ = make_logger(tmp_path / "metrics.jsonl", frequency=2, wandb_run=wandb_run)
    with logger:
        for step in range(1, 9):
            logger.log("step", {"loss/total": 1.0 / step}, optimizer_step=step, collection=0)
    assert [data["progress/optimizer_step"] for data in logged] == [2, 4]  # thinned, and off after the failure
    assert warnings == ["wandb failed, the run goes on without it (OSError: disk full)"]
    assert not wandb_run.active
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 8
    (file,) = offline_wandb.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stat().st_size > 0


def test_EI_39_a_resumed_run_goes_on_under_its_id(tmp_path: Path, offline_wandb: Path) -> None:
    """Offline each start writes files of its own; wandb joins those of one id when they are synced."""
    warnings: list[str] = []
    first = open_wandb(offline_wandb, warnings)
    assert first.run_id is not None
    first.close()
    second = open_wandb(offline_wandb, warnings, run_id=first.run_id)
    assert second.active and second.run_id == first.run_id
    logger, _ = make_logger(tmp_path / "metrics.jsonl", frequency=1, wandb_run=second)
    with logger:
        logger.log("step", {"loss/total": 1.0}, optimizer_step=3, collection=0)
    assert warnings == []
    files = list(offline_wandb.glob("wandb/offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{first.run_id}.wandb"}


def test_a_wandb_that_cannot_start_is_reported_once(
    tmp_path: Path, offline_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise wandb.errors.UsageError("no login")

    monkeypatch.setattr(wandb, "init", init)
    warnings: list[str] = []
    wandb_run = open_wandb(offline_wandb, warnings)
    logger, _ = make_logger(tmp_path / "metrics.jsonl", wandb_run=wandb_run)
    with logger:
        logger.log("step", {"loss/total": 1.0}, optimizer_step=1, collection=0)
    assert warnings == ["wandb failed, the run goes on without it (UsageError: no login)"]
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 1
