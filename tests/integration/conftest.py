"""A tiny model and a task that it can learn, and runs of the real loop on them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from expert_iteration.components import Components
from expert_iteration.config.loader import load
from expert_iteration.config.schema import RunConfig
from expert_iteration.loops import sync
from expert_iteration.metrics.sinks import Record, read_records
from expert_iteration.runtime import local
from tests.tiny import save_tiny_model, write_copy_task

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end."""

    folder: Path
    parts: Components
    result: sync.RunResult

    def records(self, kind: str) -> list[Record]:
        return [record for record in read_records(self.folder / "metrics.jsonl") if record.kind == kind]

    def series(self, kind: str, name: str) -> list[float]:
        return [record.values[name] for record in self.records(kind) if name in record.values]

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in sorted(self.parts.trainer.policy.merged_state())])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def copy_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_copy_task(tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="session")
def overrides(tiny_model: Path, copy_task: Path) -> list[str]:
    """Overrides of config/ei_gsm8k.yaml under which the tiny model learns to copy in seconds."""
    return [
        f"env.data_path={copy_task}",
        f"model.name={tiny_model}",
        "model.chat_template=plain",
        "env.prompt_template='{question}'",
        "env.reward=exact",
        "env.repeats=16",
        "num_threads=1",
        "selection.include_truncated=true",
        # auto is bfloat16 on some CPUs, and these tests compare numbers
        "train.mixed_precision=false",
        "inference_model.torch_dtype=float32",
        "ref_model.torch_dtype=float32",
        "train.topk_size=4",
        "train.dialog_turns_per_batch=128",
        "train.total_dialog_turns=256",
        "train.optim_batch_size=16",
        "train.gradient_accumulation_steps=1",
        "train.kl_to_ref_coeff=0.01",
        "train.checkpoint_frequency=null",
        "optimizer.lr=1e-2",
        "optimizer.scheduler.warmup_steps=1",
        "inference_model.max_tokens=2",
        "inference_model.temperature=1.0",
        "eval.num_prompts=null",
        "logging.progress=plain",
    ]


@pytest.fixture
def make_config(overrides: list[str]) -> Callable[..., RunConfig]:
    def make(*more: str) -> RunConfig:
        return load([*overrides, *more], config_dir=ROOT / "config", config_name="ei_gsm8k")

    return make


@pytest.fixture
def run(make_config: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., FinishedRun]:
    """Runs the loop to its end, each time in a new folder."""
    count = 0

    def run(*more: str) -> FinishedRun:
        nonlocal count
        count += 1
        folder = tmp_path / f"run{count}"
        folder.mkdir()
        parts = local.build(make_config(*more), folder)
        return FinishedRun(folder, parts, sync.run(parts))

    return run


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A cluster of this process's own; none of its processes is left afterwards."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    # Paths of Ray's sockets must not be long, and pytest's are.
    folder = tempfile.mkdtemp(prefix="ray-")
    before = psutil.Process().children(recursive=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written to the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        started = [process for process in psutil.Process().children(recursive=True) if process not in before]
        yield
        ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=40)
    shutil.rmtree(folder)
    assert not left
