"""The scripts with vLLM replicas, as a user starts them: in processes of their own, which all have to end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from expert_iteration.metrics.sinks import read_records
from tests.integration.test_script import default_signals
from tests.tiny import save_tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it for the CPU")
pytest.importorskip("ray", reason="ray is not installed")

ROOT = Path(__file__).parents[2]
MARK = "EXPERT_ITERATION_TEST"
pytestmark = pytest.mark.timeout(600)


class Script:
    """A run of one of the scripts and all processes that come from it."""

    def __init__(self, mode: str, folder: Path, overrides: list[str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.temp = tempfile.mkdtemp(prefix="ray-")  # paths of Ray's sockets must not be long
        self.weights = Path(self.temp) / "weights"
        environment = os.environ | {
            MARK: self.mark,
            "RAY_AUTH_MODE": "disabled",  # else a token is written to the home folder
            "RAY_TMPDIR": self.temp,
        }
        command = [sys.executable, str(ROOT / "scripts" / f"expert-iteration-{mode}.py"), f"mode={mode}"]
        self.process = subprocess.Popen(
            [
                *command,
                f"hydra.run.dir={folder}",
                f"hydra.sweep.dir={folder}",
                f"inference_model.weight_folder={self.weights}",
                *overrides,
            ],
            env=environment,
            cwd=folder.parent,
            stdout=(folder.parent / "stdout").open("w"),
            stderr=(folder.parent / "stderr").open("w"),
            preexec_fn=default_signals,  # noqa: PLW1509  # this process has no threads that hold locks
        )

    def output(self) -> str:
        return (self.folder.parent / "stdout").read_text() + (self.folder.parent / "stderr").read_text()

    def wait(self, time_limit_s: float = 300) -> int:
        return self.process.wait(timeout=time_limit_s)

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark in their environment."""
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def nothing_left(self, within_s: float = 40) -> bool:
        """Whether all processes and shared memory are gone soon."""
        end = time.monotonic() + within_s
        while self.processes() and time.monotonic() < end:
            time.sleep(0.2)
        return not self.processes()


@pytest.fixture
def start(overrides: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    # vLLM's attention on a CPU takes heads of 32 and more.
    model = save_tiny_model(tmp_path_factory.mktemp("m"), hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    started: list[Script] = []

    def start(mode: str, *more: str) -> Script:
        own = [entry for entry in overrides if not entry.startswith("model.name=")]
        vllm = [
            "inference_model.backend=vllm",
            "inference_model.enforce_eager=true",
            "inference_model.kv_cache_gib=0.1",
        ]
        given = [*own, f"model.name={model}", *vllm, *more]
        script = Script(mode, tmp_path / f"run{len(started)}", given)
        started.append(script)
        return script

    yield start
    for script in started:
        for process in script.processes():
            process.kill()
        assert script.nothing_left()
        shutil.rmtree(script.temp, ignore_errors=True)


def test_a_sweep_learns_on_one_cluster_and_leaves_nothing_behind(start: Callable[..., Script]) -> None:
    script = start("sync", "train.total_dialog_turns=384", "inference_model.num_devices=2", "--multirun", "seed=1,2")
    assert script.wait() == 0, script.output()
    assert script.nothing_left()
    assert not list(script.weights.iterdir())
    assert len(list(Path(script.temp).glob("ray/session_2*"))) == 1
    for job in ("0", "1"):
        records = read_records(script.folder / job / "metrics.jsonl")
        collections = [record.values for record in records if record.kind == "collection"]
        assert [values["policy/version"] for values in collections] == [0, 1, 2]
        assert all(values["policy/canary_difference"] < 1e-3 for values in collections)
        assert collections[0]["train/weights_changed_share"] == 1  # the first file replaces nothing
        assert 0 < collections[1]["train/weights_changed_share"] <= 1
        differences = [
            record.values["policy/engine_log_prob_difference"]
            for record in records
            if "policy/engine_log_prob_difference" in record.values
        ]
        assert len(differences) == 3  # the first step after each publish
        assert max(differences) < 1e-3
        assert collections[-1]["reward/mean"] > collections[0]["reward/mean"]


def test_an_asynchronous_run_generates_several_collections_at_a_time(start: Callable[..., Script]) -> None:
    script = start(
        "async",
        "train.total_dialog_turns=512",
        "train.dialog_turns_per_batch=16",
        "train.optim_batch_size=8",
        "train.weight_update_frequency=2",
        "train.collections_in_flight=4",
        "train.max_policy_age=3",
        "train.queue_size=4",
    )
    assert script.wait() == 0, script.output()
    assert script.nothing_left()
    records = read_records(script.folder / "metrics.jsonl")
    assert sum(record.kind == "collector" for record in records) == 32
    ages = [record.values["policy/age_max"] for record in records if record.kind == "step"]
    assert ages
    assert max(ages) <= 3


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_run_that_is_stopped_ends_its_replicas(
    start: Callable[..., Script], sent: signal.Signals, status: int
) -> None:
    script = start("sync", "train.total_dialog_turns=100000", "eval.at_start=false")
    log = script.folder / "metrics.jsonl"
    while script.process.poll() is None and not (log.exists() and len(read_records(log)) > 2):
        time.sleep(0.2)
    assert script.process.poll() is None, script.output()
    script.process.send_signal(sent)
    assert script.wait(60) == status, script.output()
    assert script.nothing_left()
    assert not list(script.weights.iterdir())


def test_a_model_that_vllm_cannot_run_is_one_clear_error(start: Callable[..., Script], tiny_model: Path) -> None:
    """Heads of 8, which its attention does not take."""
    script = start("sync", f"model.name={tiny_model}")
    assert script.wait() == 3
    assert "ComponentError: vLLM replica 0 failed to score: Unsupported CPU attention" in script.output()
    assert "head_dim=8" in script.output()
    assert script.nothing_left()
