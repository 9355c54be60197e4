"""What each task's options and reward components are where `env` does not say otherwise."""

from __future__ import annotations

from typing import Any

TASK_OPTIONS: dict[str, dict[str, Any]] = {
    "gsm8k": {"length_limit": 2000},
    "math": {"length_limit": 4000},
    "ifeval": {"semantics": "repaired"},
    "custom": {
        "reward": None,
        "dataset": None,
        "dataset_config": None,
        "prompt": "prompt",
        "gold": None,
        "success_at": 1.0,
        "strip_reasoning": True,
        "concurrency": 16,
        "attempts": 3,
    },
}
"""Options by task; those of reasoning_gym are its generators' own."""

REWARD_WEIGHTS: dict[str, dict[str, float]] = {
    "gsm8k": {"correct": 0.8, "format": 0.1, "closeness": 0.05, "length": 0.05},
    "math": {"correct": 0.8, "format": 0.1, "closeness": 0.05, "length": 0.05},
    "ifeval": {"prompt_strict": 0.4, "prompt_loose": 0.0, "instruction_strict": 0.4, "instruction_loose": 0.2},
}
"""Components of the graded reward by task; the other tasks have none."""
