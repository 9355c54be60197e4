"""The collector's metrics: what they are, and that nobody waits for them and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from threading import Event

import pytest

from expert_iteration.metrics.data_logger import CollectedData, RemoteDataLogger
from expert_iteration.metrics.logger import MetricsLogger
from expert_iteration.metrics.sinks import read_records
from expert_iteration.metrics.terminal import PlainTerminal
from expert_iteration.types import Prompt, Rollout, RolloutGroup, Score, Turn


def group(*rollouts: tuple[float | None, int, int], source: str = "policy") -> RolloutGroup:
    """Rollouts of (reward, response tokens, policy version)."""
    return RolloutGroup(
        Prompt(0, ()),
        0,
        tuple(
            Rollout((Turn((1,), (5,) * length, (-1.0,) * length, "stop"),), "x", Score(reward), version, source)
            for reward, length, version in rollouts
        ),
    )


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[MetricsLogger]:
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger(path, terminal=PlainTerminal(StringIO()), wandb_run=None, logging_frequency=1) as logger:
        yield logger


def test_metrics_by_hand(logger: MetricsLogger) -> None:
    groups = [group((0.0, 2, 3), (1.0, 4, 3)), group((None, 6, 5)), group((9.0, 99, 0), source="human")]
    data_logger = RemoteDataLogger(logger)
    metrics = data_logger.log_data(CollectedData(groups, 0, 0, 1.5))
    data_logger.close()
    assert metrics == {
        "collector/reward_mean": 0.5,
        "collector/reward_std": 0.5,
        "collector/reward_min": 0.0,
        "collector/reward_max": 1.0,
        "collector/response_tokens_mean": 4.0,
        "collector/response_tokens_std": pytest.approx((8 / 3) ** 0.5),
        "collector/response_tokens_min": 2,
        "collector/response_tokens_max": 6,
        "collector/policy_version_mean": pytest.approx(11 / 3),
        "collector/policy_version_min": 3,
        "collector/policy_version_max": 5,
        "collector/seconds_between_batches": 1.5,
    }


def test_nobody_waits_for_a_slow_log_and_nothing_is_lost(logger: MetricsLogger, tmp_path: Path) -> None:
    release = Event()

    class Slow(RemoteDataLogger):
        def log_data(self, data: CollectedData) -> dict[str, float]:
            assert release.wait(10)
            return {**super().log_data(data), "collector/index": data.index}

    data_logger = Slow(logger)
    for step in range(50):
        data_logger.submit([group((1.0, 3, step))], step)
    assert read_records(tmp_path / "metrics.jsonl") == []  # all 50 were taken while the log stood still
    release.set()
    data_logger.close()
    data_logger.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record.kind for record in records] == ["collector"] * 50
    assert [record.values["collector/index"] for record in records] == list(range(50))
    assert [record.values["progress/optimizer_step"] for record in records] == list(range(50))
    assert "collector/seconds_between_batches" not in records[0].values
    assert records[1].values["collector/seconds_between_batches"] >= 0


def test_a_logger_that_fails_is_told_once_and_stops_nothing(
    logger: MetricsLogger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(RemoteDataLogger):
        def log_data(self, data: CollectedData) -> dict[str, float]:
            if data.index < 2:
                raise KeyError("no such part")
            return {"collector/fine": 1.0}

    data_logger = Broken(logger)
    for _ in range(3):
        data_logger.submit([], 0)
    data_logger.close()
    error = capsys.readouterr().err
    assert error.count("The data logger failed") == 1
    assert "no such part" in error
    assert [record.values["collector/fine"] for record in read_records(tmp_path / "metrics.jsonl")] == [1.0]
