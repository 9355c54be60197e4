"""Where each replica runs, as options of its Ray actor.

On one machine this program places the replicas itself, as the device plan says; on a cluster that was there before
(`ray.init_config.address`) Ray does, in a placement group.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import ComponentError, Problem, UserError
from expert_iteration.runtime.plan import device_plan

RESERVE_LIMIT_S = 60.0
"""How long a cluster may take to free what the replicas need."""
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core runs in the actor itself
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Options of each replica's actor, and what a cluster has reserved for them."""

    options: list[dict[str, Any]]
    group: PlacementGroup | None = None

    def wait(self) -> None:
        """Waits until the cluster has what was reserved, which it may not have after a node left.

        Raises:
            ComponentError: it does not have it in time.
        """
        if self.group is not None and not self.group.wait(RESERVE_LIMIT_S):
            there = _there(self.group.bundle_specs[0])
            raise ComponentError(
                f"the cluster lost a node, and {RESERVE_LIMIT_S:g} s later it has {there}: too little for "
                f"{self.group.bundle_count} replicas"
            )

    def release(self) -> None:
        """Gives back what was reserved."""
        if self.group is not None:
            remove_placement_group(self.group)


def place(config: RunConfig, num_gpus: int) -> Placement:
    """The replicas of a run on a machine with `num_gpus`, or on the cluster that it has joined.

    Raises:
        UserError: the cluster has not what the replicas ask for.
    """
    size = config.inference_model.tensor_parallel_size
    num_replicas = config.inference_model.num_devices // size
    if config.ray.init_config.get("address", "local") != "local":
        gpus = size if ray.cluster_resources().get("GPU", 0) else 0
        group = _reserve(num_replicas, gpus)
        options = [
            {
                "num_cpus": 1,
                "num_gpus": gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
                "runtime_env": {"env_vars": VARIABLES | ({} if gpus else _openmp())},
            }
            for index in range(num_replicas)
        ]
        return Placement(options, group)
    variables = _on_gpus(config, num_gpus) if num_gpus else _on_cores(config, num_replicas)
    return Placement([{"num_cpus": 0, "runtime_env": {"env_vars": VARIABLES | own}} for own in variables])


def _reserve(num_replicas: int, gpus: int) -> PlacementGroup:
    """One bundle for each replica, near each other where there is room."""
    bundle = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
    group = placement_group([bundle] * num_replicas, strategy="PACK")
    if group.wait(RESERVE_LIMIT_S):
        return group
    remove_placement_group(group)
    asked = ", ".join(f"{num_replicas * amount:g} {name}" for name, amount in bundle.items())
    raise UserError(
        Problem(
            "inference_model.num_devices",
            num_replicas * max(1, gpus),
            f"asks the Ray cluster for {asked}, and after {RESERVE_LIMIT_S:g} s it has {_there(bundle)}",
            "lower it, add nodes, or wait until others have finished",
        )
    )


def _there(names: Iterable[str]) -> str:
    """What the cluster has of these resources."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in names)


def _on_gpus(config: RunConfig, num_gpus: int) -> list[dict[str, str]]:
    """A replica sees the GPUs that the device plan gives it."""
    size, devices = config.inference_model.tensor_parallel_size, device_plan(config, num_gpus).inference
    shares = [devices[first : first + size] for first in range(0, len(devices), size)]
    return [
        {
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(str(device.index) for device in share),
        }
        for share in shares
    ]


def _on_cores(config: RunConfig, num_replicas: int) -> list[dict[str, str]]:
    """The replicas share the cores of the run; two have a core in common where there are fewer cores than replicas."""
    cores = sorted(os.sched_getaffinity(0))[: config.num_threads]
    shares = [cores[index::num_replicas] or [cores[index % len(cores)]] for index in range(num_replicas)]
    return [{"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, share))} | _openmp() for share in shares]


def _openmp() -> dict[str, str]:
    """Intel's OpenMP runtime, which vLLM is faster with, where it is installed."""
    library = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}
