"""Ray itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from expert_iteration.errors import Problem, UserError

DEFAULTS: dict[str, Any] = {
    "address": "local",
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
}
"""Of ray.init. A cluster of one's own by default, so that another one on the machine is neither used nor disturbed."""

ANSWER_LIMIT_S = 30.0
"""For a cluster to answer. ray.init itself would try for ever."""

_started: list[tuple[str, dict[str, Any]]] = []
"""Address of the cluster that this process has started or joined, and with which arguments."""


def start(init_config: Mapping[str, Any]) -> None:
    """Starts or joins a cluster, unless this process is in one already: the jobs of a sweep share theirs.

    Ray itself leaves it when the process ends, and ends it where it was started here.

    Raises:
        UserError: ray.init refuses its arguments, there is no cluster at the address, or a job before this one has
            started one with other arguments.
    """
    wanted = dict(init_config)
    if ray.is_initialized():
        before = dict(_started).get(ray.get_runtime_context().gcs_address, wanted)
        if before != wanted:
            constraint = f"the jobs of a sweep share one cluster, which was started with {before}"
            raise UserError(Problem("ray.init_config", wanted, constraint, "give all jobs the same"))
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = wanted.get("address", DEFAULTS["address"])
    if address != DEFAULTS["address"] and not str(address).startswith("ray://") and not _answers(str(address)):
        raise UserError(
            Problem(
                "ray.init_config.address",
                address,
                f"no Ray cluster answers there within {ANSWER_LIMIT_S:.0f} s",
                "start one by `ray start --head`, correct the address, or leave ray.init_config blank for a cluster of "
                "this run's own on this machine",
            )
        )
    try:
        with _own_signal_handlers():
            ray.init(**(DEFAULTS | wanted))
    except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            Problem(
                "ray.init_config",
                wanted,
                f"ray.init does not take it ({type(error).__name__}: {error})",
                "correct it, or leave it blank for a cluster of this run's own on this machine",
            )
        ) from error
    _started[:] = [(ray.get_runtime_context().gcs_address, wanted)]


def _answers(address: str) -> bool:
    """Whether `ray status` gets an answer: in a process of its own, because Ray's tries cannot be ended in this one."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=ANSWER_LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Puts this program's handlers back: Ray's, below Python's, prints a stack trace at SIGTERM and aborts."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
