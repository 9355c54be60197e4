"""What a run goes on from: gathered from its parts for a checkpoint, and given back to new ones.

The weights are saved apart (checkpoint.py), and the trainer gets its counters when it is built, before the engine is
given anything.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from expert_iteration.components import Components
from expert_iteration.loops.progress import Progress
from expert_iteration.run_folder import METRICS_FILE, SAMPLES_FILE, size_of


def capture(parts: Components, progress: Progress, *, is_over: bool, in_pass: bool) -> dict[str, Any]:
    """Plain types and tensors, some of them the parts' own.

    Args:
        parts: of the run.
        progress: where it stands.
        is_over: nothing is trained any more: optimizer and buffer are left out.
        in_pass: in the middle of a pass over the buffer, which will be begun again.
    """
    return {
        "progress": asdict(progress),
        "trainer": parts.trainer.state_dict(with_optimizer=not is_over),
        "buffer": None if is_over else parts.buffer.state_dict(at_start_of_pass=in_pass),
        "prompts": parts.collector.stream.state_dict(),
        "published": {
            "changed_share": parts.weight_sync.changed_share,
            "canary_difference": parts.weight_sync.canary_difference,
        },
        "random": _random_state(),
        "log": {
            "collections": progress.collection + progress.is_stored,
            "metrics_bytes": size_of(parts.run_dir / METRICS_FILE),
            "samples_bytes": size_of(parts.run_dir / SAMPLES_FILE),
            "elapsed": parts.logger.elapsed,
            "wandb_run_id": parts.logger.wandb_run_id,
        },
    }


def restore(parts: Components, state: Mapping[str, Any]) -> Progress:
    """Gives the parts what `capture` took, but for the trainer, and returns where the run stands."""
    if state["buffer"] is not None:
        parts.buffer.load_state_dict(state["buffer"])
    parts.collector.stream.load_state_dict(state["prompts"])
    parts.data_logger.count_from(state["log"]["collections"])
    parts.weight_sync.changed_share = state["published"]["changed_share"]
    parts.weight_sync.canary_difference = state["published"]["canary_difference"]
    _set_random_state(state["random"])
    return Progress(**state["progress"])


def _random_state() -> dict[str, Any]:
    """Of the global generators of torch, Python and numpy."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = numpy_state
    return {
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
