"""Which engine a run has, and how it is built."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from expert_iteration.config.schema import RunConfig
from expert_iteration.engines.local import LocalEngine
from expert_iteration.engines.weight_files import WeightFiles
from expert_iteration.errors import Problem, UserError
from expert_iteration.model import load_inference_model, resolve_dtype
from expert_iteration.model_source import local_files_only, resolve_model
from expert_iteration.runtime.backend import backend, missing_packages
from expert_iteration.runtime.plan import GIB, check_cache, max_cached_tokens

if TYPE_CHECKING:  # Ray and vLLM are optional
    from expert_iteration.engines.vllm.replica import VllmSettings
    from expert_iteration.runtime.ray.engine import VllmRayEngine

SHARED_MEMORY = Path("/dev/shm")


def check_backend(config: RunConfig) -> None:
    """Raises UserError when the backend needs what is not installed, or its folder cannot be written to."""
    if backend(config) != "vllm":
        return
    if missing := missing_packages():
        raise UserError(
            Problem(
                "inference_model.backend",
                "vllm",
                f"needs the Python packages vllm and ray, and {' and '.join(missing)} cannot be found",
                "install them (pip install 'expert-iteration[vllm]'; docs/vllm.md for a CPU), or write "
                "inference_model.backend=local",
            )
        )
    size, num_gpus = config.inference_model.tensor_parallel_size, torch.cuda.device_count()
    if size > max(1, num_gpus):
        raise UserError(
            Problem(
                "inference_model.tensor_parallel_size",
                size,
                f"one replica asks for {size} GPUs, {num_gpus} are available",
                f"write at most {max(1, num_gpus)}",
            )
        )
    folder = Path(config.inference_model.weight_folder or _shared_memory())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            Problem(
                "inference_model.weight_folder",
                folder,
                f"weights are published through this folder, and it cannot be written to ({error})",
                "name one that can",
            )
        ) from error


def build_engine(config: RunConfig, device: torch.device, tell: Callable[[str], None]) -> LocalEngine | VllmRayEngine:
    """The engine with the weights that the run starts from.

    Raises:
        UserError: the model does not fit the engine.
        ComponentError: a replica does not start.
    """
    return _build_vllm(config, device, tell) if backend(config) == "vllm" else _build_local(config, device)


def _build_local(config: RunConfig, device: torch.device) -> LocalEngine:
    model = load_inference_model(config, device)
    check_cache(config, model.config)
    try:
        return LocalEngine(
            model, max_sequences=config.env.num_envs, max_cached_tokens=max_cached_tokens(config, model.config)
        )
    except ValueError as error:
        raise UserError(
            Problem(
                "model.name",
                config.model.name,
                f"the in-process engine cannot run it: {error}",
                "name a decoder-only model with full or sliding-window attention",
            )
        ) from error


def _build_vllm(config: RunConfig, device: torch.device, tell: Callable[[str], None]) -> VllmRayEngine:
    from expert_iteration.runtime.ray import cluster, placement
    from expert_iteration.runtime.ray.engine import VllmRayEngine

    inference = config.inference_model
    cluster.start(config.ray.init_config)
    where = placement.place(config, torch.cuda.device_count())
    folder = Path(tempfile.mkdtemp(prefix="expert-iteration-", dir=inference.weight_folder or _shared_memory()))
    return VllmRayEngine(
        vllm_settings(config, device),
        where,
        WeightFiles(folder),
        time_limit_s=inference.time_limit_s,
        max_restarts=inference.max_restarts,
        tell=tell,
    )


def vllm_settings(config: RunConfig, device: torch.device) -> VllmSettings:
    """What each replica is built from."""
    from expert_iteration.engines.vllm.replica import VllmSettings

    inference, source = config.inference_model, resolve_model(config.model.name)
    on_gpu = device.type == "cuda"
    return VllmSettings(
        model=str(source),
        dtype=str(resolve_dtype(inference.torch_dtype, device)).removeprefix("torch."),
        seed=config.seed,
        num_gpus=inference.tensor_parallel_size if on_gpu else 0,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        kv_cache_bytes=None if on_gpu else int(inference.kv_cache_gib * GIB),
        max_sequences=config.env.num_envs,
        enforce_eager=inference.enforce_eager,
        quantization=inference.quantization,
        trust_remote_code=config.model.trust_remote_code,
        max_model_len=None,
        local_files_only=local_files_only(source),
    )


def canary_tolerance(config: RunConfig, dtype: torch.dtype) -> float:
    """Largest difference of log-probs between trainer and engine, in nats per token."""
    inference = config.inference_model
    if inference.canary_tolerance is not None:
        return inference.canary_tolerance
    elif inference.quantization is not None:
        return 0.5
    else:
        return 0.005 if dtype == torch.float32 else 0.05


def _shared_memory() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
