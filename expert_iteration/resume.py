"""Where a run goes on: from which checkpoint, in which folder, and whether the config is still the run's own.

Decided before Hydra makes a folder, so without torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expert_iteration.checkpoint_files import COMPLETE, complete, damage, read_metadata
from expert_iteration.config import derived
from expert_iteration.config.paths import RESUME_WORDS
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import Problem, UserError
from expert_iteration.run_folder import CHECKPOINTS, FINISHED_FILE, METRICS_FILE

NEVER, AUTO = RESUME_WORDS
MAY_CHANGE = (
    "resume",
    "resume_mismatch",
    "plan",
    "num_threads",  # part of the environment, which is compared on its own
    "logging",
    "ray",
    "eval.at_end",
    "eval.num_transcripts",
    "env.verifier_workers",
    "train.checkpoint_frequency",
    "train.keep_checkpoints",
    "train.keep_best",
    "train.logging_frequency",
    "train.max_empty_collections",
    "train.max_skipped_steps",
    "train.max_time",
    "train.max_wait_s",
    "inference_model.weight_folder",
    "inference_model.canary_tolerance",
    "inference_model.max_restarts",
    "inference_model.time_limit_s",
    "inference_model.gpu_memory_utilization",
)
"""Keys, or what keys below them have in common, that decide nothing about the weights that come out."""
REASONS = {
    "model": "the checkpoint's weights belong to it",
    "train_model": "the checkpoint's weights and moments belong to it",
    "ref_model": "the KL has to go on being measured to the same reference",
    "optimizer": "the checkpoint's moments and the schedule so far belong to it",
    "env": "prompts and rewards so far belong to it",
    "eval": "accuracies before and after have to be of the same problems",
}
"""Why keys of a group may not change; the others decide what the steps so far have done."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint to go on from, whole as its checksums say, and the folder of its run."""

    checkpoint: Path
    run_dir: Path


def find(config: RunConfig, run_dirs: Iterable[Path], tell: Callable[[str], None]) -> Found | None:
    """What `config.resume` asks for; None starts a new run.

    Args:
        config: with absolute paths.
        run_dirs: folders in which runs of the same command line may lie.
        tell: takes a line for the user.

    Raises:
        UserError: resume is a path, and there is no whole checkpoint of a run.
    """
    if config.resume == NEVER:
        return None
    if config.resume != AUTO:
        return _at(Path(config.resume), tell)
    checkpoint_dir = config.logging.checkpoint_dir
    folders = [Path(checkpoint_dir)] if checkpoint_dir is not None else [path / CHECKPOINTS for path in run_dirs]
    name = derived.experiment_name(config)
    ours = [
        checkpoint
        for folder in folders
        for checkpoint in complete(folder)
        if read_metadata(checkpoint).get("experiment_name") == name
    ]
    newest_first = sorted(ours, key=lambda checkpoint: (checkpoint / COMPLETE).stat().st_mtime_ns, reverse=True)
    for checkpoint in newest_first:
        run_dir = _run_dir(checkpoint)
        if run_dir is not None and (run_dir / FINISHED_FILE).exists():
            break
        if run_dir is not None and _is_whole(checkpoint, tell):
            return Found(checkpoint, run_dir)
    tell(f"resume=auto: no run named {name} has been cut short, a new one starts.")
    return None


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Problem]:
    """A problem for each key that has another value than in the run that is resumed, and may not."""
    old, new = dict(_flat(before)), dict(_flat(json.loads(json.dumps(asdict(config)))))
    return [
        Problem(
            key,
            new[key],
            f"the run that is resumed has {old[key]!s}, and "
            + REASONS.get(key.partition(".")[0], "it decides what the steps so far have done"),
            "write that again, or start a new run by resume=never",
        )
        for key in sorted(old.keys() & new.keys())
        if old[key] != new[key] and not _may_change(key)
    ]


def _at(path: Path, tell: Callable[[str], None]) -> Found:
    """A checkpoint, or the newest whole one of a folder of checkpoints or of a run."""
    here = [path] if (path / COMPLETE).is_file() else complete(path) or complete(path / CHECKPOINTS)
    if not here:
        constraint = "holds no complete checkpoint"
        way_out = "give a folder checkpoint_NNNN, or that of a run, or resume=never"
        raise UserError(Problem("resume", path, constraint, way_out))
    for checkpoint in here:
        if not _is_whole(checkpoint, tell):
            continue
        run_dir = _run_dir(checkpoint)
        if run_dir is None:
            constraint = "its run's folder, with metrics.jsonl, is gone"
            way_out = "put it back, or start a new run from the saved model by model.name"
            raise UserError(Problem("resume", checkpoint, constraint, way_out))
        if (run_dir / FINISHED_FILE).exists():
            raise UserError(
                Problem("resume", run_dir, "this run has come to its end", "start a new one by resume=never")
            )
        return Found(checkpoint, run_dir)
    raise UserError(Problem("resume", path, "all its checkpoints are damaged", "start a new run by resume=never"))


def _is_whole(checkpoint: Path, tell: Callable[[str], None]) -> bool:
    wrong = damage(checkpoint)
    if wrong is not None:
        tell(f"Passed over {checkpoint}: {wrong}.")
    return wrong is None


def _run_dir(checkpoint: Path) -> Path | None:
    """The run's folder: where it lies now if it was moved together with its checkpoints, or where it was."""
    was = read_metadata(checkpoint).get("run_dir")
    for folder in (checkpoint.parent.parent, *([Path(was)] if isinstance(was, str) else [])):
        if (folder / METRICS_FILE).is_file():
            return folder
    return None


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots and their values; an empty mapping is a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
