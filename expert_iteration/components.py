"""Everything that a loop works with. A runtime builds it, a loop runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from expert_iteration.chat import ChatEncoder
from expert_iteration.collector import Collector
from expert_iteration.config.schema import RunConfig
from expert_iteration.engine_gate import EngineGate
from expert_iteration.metrics.data_logger import RemoteDataLogger
from expert_iteration.metrics.logger import MetricsLogger
from expert_iteration.replay_buffer import ReplayBuffer
from expert_iteration.saver import RunSaver
from expert_iteration.trainer import Trainer
from expert_iteration.types import Engine, Prompt, SamplingParams, Task, Verifier, WeightSync


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of one run, ready to go."""

    config: RunConfig
    run_dir: Path
    task: Task
    verifier: Verifier
    """Closed by the loop at the end of the run."""
    encoder: ChatEncoder
    engine: Engine
    """Closed by the loop at the end of the run."""
    engine_gate: EngineGate
    collector: Collector
    buffer: ReplayBuffer
    trainer: Trainer
    weight_sync: WeightSync
    logger: MetricsLogger
    data_logger: RemoteDataLogger
    """Closed by the loop before the logger that it writes to."""
    eval_prompts: Sequence[Prompt]
    """Held-out problems; none of them is trained on."""
    eval_sampling: SamplingParams
    saver: RunSaver
    lock: FileLock
    """On the run's folder; released by the loop at the end of the run."""
    resumed: Mapping[str, Any] | None
    """What the run goes on from, as `RunSaver.save` got it; None in a new run."""
    peak_memory_gib: Callable[[], float]
