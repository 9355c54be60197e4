"""Which engine a run has."""

from __future__ import annotations

import importlib.util

import torch

from expert_iteration.config.schema import RunConfig


def backend(config: RunConfig) -> str:
    """`local` or `vllm`: what `inference_model.backend` says, and for `auto` vllm where it can use a GPU."""
    asked = config.inference_model.backend
    if asked != "auto":
        return asked
    return "vllm" if torch.cuda.is_available() and not missing_packages() else "local"


def missing_packages() -> list[str]:
    """Packages that the vLLM backend needs and that are not installed."""
    return [name for name in ("vllm", "ray") if importlib.util.find_spec(name) is None]
