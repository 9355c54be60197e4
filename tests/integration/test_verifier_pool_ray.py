"""A verifier pool inside a Ray actor. Run: pytest tests/integration/test_verifier_pool_ray.py"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray", reason="not installed: ray")

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.5
HUNG = (None, {"success": 0.0, "timed_out": 1.0})
CRASHED = (None, {"success": 0.0, "crashed": 1.0})


class Scorer:
    """What becomes the actor: it scores texts by a pool of its own, in whichever thread Ray calls it."""

    def __init__(self, workers: int) -> None:
        from expert_iteration.tasks.verifier_pool import VerifierPool
        from tests.slow_verifiers import score_by_text

        self.pool = VerifierPool(score_by_text, workers=workers, time_limit_s=LIMIT_S)

    def score(self, texts: list[str]) -> list[tuple[float | None, dict[str, float]]]:
        from expert_iteration.types import Prompt

        scores = self.pool.score_many([(Prompt(0, (), "xx"), text) for text in texts])
        return [(score.reward, dict(score.details)) for score in scores]

    def processes(self) -> list[int]:
        """The actor's process id, and those of all that it started: workers, and the server that forks them."""
        this = psutil.Process()
        return [this.pid, *(child.pid for child in this.children(recursive=True))]

    def close(self) -> list[str]:
        """Closes the pool; the names of the verifiers that are left."""
        import multiprocessing

        self.pool.close()
        return [process.name for process in multiprocessing.active_children()]


@pytest.fixture(scope="module")
def actor_class() -> Iterator[Any]:
    """The actor's class, in a Ray of one CPU that is gone afterwards, with all of its processes and files."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path must not be longer than 107 characters
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        yield ray.remote(num_cpus=0, max_concurrency=4)(Scorer)
        ray.shutdown()
        shutil.rmtree(folder)
    assert started and not psutil.wait_procs(started, timeout=60)[1]


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Those that are still there after so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if psutil.pid_exists(pid)]


def test_EI_29_in_an_actor_hung_and_crashed_items_are_unscored_and_the_rest_scored_from_any_thread(
    actor_class: Any,
) -> None:
    actor = actor_class.remote(workers=2)
    scores = ray.get(actor.score.remote(["x", "xx", "sleep", "exit", "spin", "xxx"]))
    assert [reward for reward, _ in scores] == [1.0, 2.0, None, None, None, 3.0]
    assert [scores[2], scores[3], scores[4]] == [HUNG, CRASHED, HUNG]
    at_once = [actor.score.remote(["x" * number] * 5 + ["spin"]) for number in range(3)]
    assert ray.get(at_once) == [[(float(number), {"success": float(number == 2)})] * 5 + [HUNG] for number in range(3)]
    with pytest.raises(ray.exceptions.RayTaskError, match="a bug in the verifier"):
        ray.get(actor.score.remote(["raise"]))
    assert ray.get(actor.score.remote(["xx"])) == [(2.0, {"success": 1.0})]
    pids = ray.get(actor.processes.remote())
    assert ray.get(actor.close.remote()) == []
    ray.kill(actor)
    assert wait_until_gone(pids, 30) == []


def test_verifiers_idle_or_hung_end_by_themselves_when_their_actor_was_killed(actor_class: Any) -> None:
    actor = actor_class.remote(workers=2)
    ray.get(actor.score.remote(["x"] * 50))
    hung = actor.score.remote(["spin"] * 100)
    pids = ray.get(actor.processes.remote())
    assert len(pids) >= 4  # the actor, the server, two workers, and Python's resource tracker
    ray.kill(actor)
    assert wait_until_gone(pids, 30) == []
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(hung)
