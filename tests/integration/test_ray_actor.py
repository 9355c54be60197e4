"""The verifier pool inside a Ray actor, on a real local Ray."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from expert_iteration.tasks.verifier_pool import VerifierPool
from expert_iteration.types import Prompt, Score
from tests.slow_verifiers import score_by_text

ray = pytest.importorskip("ray", reason="ray is not installed")

PROMPT = Prompt(0, (), "xx")
TIMED_OUT = Score(None, {"success": 0.0, "timed_out": 1.0})
CRASHED = Score(None, {"success": 0.0, "crashed": 1.0})


def of_length(length: int) -> Score:
    return Score(float(length), {"success": float(length == 2)})


class Scorer:
    """An actor that owns a pool."""

    def __init__(self, time_limit_s: float) -> None:
        self._pool = VerifierPool(score_by_text, workers=1, time_limit_s=time_limit_s)

    def score(self, texts: list[str]) -> list[Score]:
        return self._pool.score_many([(PROMPT, text) for text in texts])

    def score_in_threads(self, batches: list[list[str]]) -> list[list[Score]]:
        with ThreadPoolExecutor(len(batches)) as threads:
            return list(threads.map(self.score, batches))

    def processes(self) -> list[int]:
        """Process ids of the actor and of those that it has started."""
        return [os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))]


@pytest.fixture
def scorer(local_ray: None) -> Iterator[Any]:
    # One CPU for the pool's owner: several calls at a time, so from several threads of the actor.
    actor = ray.remote(num_cpus=1, max_concurrency=4)(Scorer).remote(0.5)
    yield actor
    ray.kill(actor)


def test_EI_29_a_pool_in_a_ray_actor_scores_and_outlives_items_that_hang_and_crash(scorer: Any) -> None:
    texts = ["x", "sleep", "exit", "xx", "spin", "xxx"]
    assert ray.get(scorer.score.remote(texts)) == [
        *(of_length(1), TIMED_OUT, CRASHED),
        *(of_length(2), TIMED_OUT, of_length(3)),
    ]
    assert ray.get(scorer.score.remote(["xx"])) == [of_length(2)]
    # From threads that the actor starts, and from those in which Ray runs its calls.
    batches = [["x", "xx"], ["sleep", "x"], ["exit"], ["xxx"] * 20]
    expected = [[of_length(1), of_length(2)], [TIMED_OUT, of_length(1)], [CRASHED], [of_length(3)] * 20]
    assert ray.get(scorer.score_in_threads.remote(batches)) == expected
    assert ray.get([scorer.score.remote(batch) for batch in batches]) == expected


@pytest.mark.parametrize("how", ["by Ray", "from outside"])
def test_the_processes_of_a_pool_end_with_its_actor(local_ray: None, how: str) -> None:
    scorer = ray.remote(num_cpus=1, max_concurrency=4)(Scorer).remote(600.0)
    ray.get(scorer.score.remote(["x"]))
    processes = [psutil.Process(pid) for pid in ray.get(scorer.processes.remote())]
    assert len(processes) >= 3  # the actor, the server that forks workers, the worker
    scorer.score.remote(["spin"])
    time.sleep(0.5)
    if how == "by Ray":
        ray.kill(scorer)
    else:
        os.kill(processes[0].pid, signal.SIGKILL)
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left
