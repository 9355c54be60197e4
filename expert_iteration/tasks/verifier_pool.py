"""Scoring in worker processes, with a time limit that nothing gets around: a hung or crashed worker is replaced.

    score_many(items) -> chunks -> idle workers -> one message per item, with its score -> scores in the order of items

A worker that says nothing for the time limit is killed, and so the item at which it stood is known: scores come in the
order of the chunk. That item is unscored (reward None); the rest of the chunk goes to another worker.

Workers are forked from a server process that has imported what they need, so that a new one is there in milliseconds.
The calling process uses no signals: any thread may score.
"""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

from expert_iteration.errors import ComponentError
from expert_iteration.types import Prompt, Score

Item = tuple[Prompt, str]
"""A prompt and the text of one response to it."""
ScoreFunction = Callable[[Prompt, str], Score] | Callable[[Prompt, str], Awaitable[Score]]

MAX_CHUNK = 32
MAX_ITEMS_PER_WORKER = 20_000
"""A worker is replaced after so many items: what a verifier leaks goes with it."""
START_LIMIT_S = 300.0
MAX_FAILED_STARTS = 3
GRACE_S = 1.0
"""An async item that keeps to the event loop is cancelled at the time limit; a worker gets so much longer to say so."""


class InProcessVerifier:
    """Scores one item after another where it is called, without a time limit."""

    def __init__(self, score: Callable[[Prompt, str], Score]) -> None:
        self._score = score

    def score_many(self, items: Sequence[Item]) -> list[Score]:
        """One score per item, in order."""
        return [self._score(prompt, text) for prompt, text in items]

    def close(self) -> None:
        """Nothing to close."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One process, and what it has been given to do."""

    process: BaseProcess
    connection: Connection
    deadline: float
    is_ready: bool = False
    num_items: int = 0
    pending: deque[int] = field(default_factory=deque)
    """Items of the chunk without a score yet, in the order of the chunk."""


class VerifierPool:
    """Scores in `workers` processes, each item within `time_limit_s` seconds.

    Args:
        score: picklable. Where it is a coroutine function, each worker has several items in flight.
        workers: processes, at least 1. They start with the first items.
        time_limit_s: most seconds for one item.
        concurrency: items of an async `score` in flight, over all workers.

    An item above its limit, or at which the worker died, gets `Score(None, {"success": 0, "timed_out": 1})`, or
    `"crashed"`; `num_timed_out` and `num_crashed` count them. Several threads may call `score_many`: they take turns.
    """

    def __init__(
        self, score: ScoreFunction, *, workers: int, time_limit_s: float, concurrency: int = MAX_CHUNK
    ) -> None:
        if workers < 1 or time_limit_s <= 0 or concurrency < 1:
            raise ValueError(f"workers={workers}, time_limit_s={time_limit_s}, concurrency={concurrency}")
        self.num_timed_out = 0
        self.num_crashed = 0
        self._pickled_score = pickle.dumps(score)
        self._is_async = inspect.iscoroutinefunction(score)
        self._num_workers = min(workers, concurrency) if self._is_async else workers
        self._max_chunk = max(1, concurrency // self._num_workers) if self._is_async else MAX_CHUNK
        self._time_limit_s = time_limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_imports_of_a_worker(score))
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._is_closed = False

    def score_many(self, items: Sequence[Item]) -> list[Score]:
        """One score per item, in order.

        Raises ComponentError, with the worker's traceback, when `score` itself raises or cannot be loaded.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError("the pool is closed")
            try:
                return self._run(items)
            finally:
                # After an exception, Ctrl-C included, scores that nobody waits for would answer the next call.
                for worker in [worker for worker in self._workers if worker.pending]:
                    self._discard(worker)

    def close(self) -> None:
        """Ends all workers, busy or not. May be called again."""
        with self._lock:
            self._is_closed = True
            while self._workers:
                self._discard(self._workers[-1])

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, items: Sequence[Item]) -> list[Score]:
        scores: dict[int, Score] = {}
        size = max(1, min(self._max_chunk, ceil(len(items) / (4 * self._num_workers))))
        if self._is_async:
            size = min(self._max_chunk, ceil(len(items) / self._num_workers))
        chunks = deque(
            list(range(first, min(first + size, len(items)))) for first in range(0, len(items), max(size, 1))
        )
        while len(scores) < len(items):
            self._start_workers(len(chunks))
            for worker in self._workers:
                if worker.is_ready and not worker.pending and chunks:
                    self._give(worker, chunks.popleft(), items)
            waited_for = {w.connection: w for w in self._workers if w.pending or not w.is_ready}
            patience = min(worker.deadline for worker in waited_for.values()) - monotonic()
            answered = [waited_for[connection] for connection in wait(list(waited_for), max(0.0, patience))]  # type: ignore[index]
            for worker in answered:
                if not self._receive(worker, scores):
                    self._replace(worker, "crashed", scores, chunks)
            now = monotonic()
            for worker in waited_for.values():
                if worker not in answered and worker.deadline <= now:
                    self._replace(worker, "timed_out", scores, chunks)
        return [scores[index] for index in range(len(items))]

    def _start_workers(self, num_chunks: int) -> None:
        """Starts as many as there is work for; those that have scored enough make room first."""
        for worker in [w for w in self._workers if w.num_items >= MAX_ITEMS_PER_WORKER and not w.pending]:
            self._discard(worker)
        num_busy = sum(bool(worker.pending) for worker in self._workers)
        while len(self._workers) < min(self._num_workers, num_busy + num_chunks):
            parent_end, child_end = self._context.Pipe()
            _limit_sending(parent_end, self._time_limit_s)
            arguments = (child_end, self._pickled_score, self._time_limit_s)
            process = self._context.Process(target=_work, args=arguments, daemon=True, name="verifier")
            process.start()
            child_end.close()
            self._workers.append(_Worker(process, parent_end, monotonic() + START_LIMIT_S))

    def _give(self, worker: _Worker, chunk: list[int], items: Sequence[Item]) -> None:
        worker.pending.extend(chunk)
        worker.num_items += len(chunk)
        self._extend_deadline(worker)
        with suppress(OSError):  # it died or hung while it was idle: the wait for its answer finds that out
            worker.connection.send([(index, *items[index]) for index in chunk])

    def _receive(self, worker: _Worker, scores: dict[int, Score]) -> bool:
        """Takes what the worker has sent; false when it is dead."""
        try:
            while worker.connection.poll():
                index, answer = worker.connection.recv()
                if isinstance(answer, str):
                    raise ComponentError(f"a verifier failed in its worker process:\n{answer}")
                elif index is None:
                    worker.is_ready = True
                    self._failed_starts = 0
                else:
                    worker.pending.remove(index)
                    scores[index] = answer
                    self.num_timed_out += answer.reward is None and "timed_out" in answer.details
                    self._extend_deadline(worker)
        except (EOFError, ConnectionError):
            return False
        return True

    def _extend_deadline(self, worker: _Worker) -> None:
        worker.deadline = monotonic() + self._time_limit_s + (GRACE_S if self._is_async else 0.0)

    def _replace(self, worker: _Worker, how: str, scores: dict[int, Score], chunks: deque[list[int]]) -> None:
        """Kills a worker; the item that it was at is unscored, the others of its chunk wait for another worker."""
        pending = list(worker.pending)
        is_ready = worker.is_ready
        self._discard(worker)
        if not is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise ComponentError(
                    f"a verifier's worker process {how.replace('_', ' ')} {MAX_FAILED_STARTS} times at its start, "
                    'for a reason above; a script of your own needs `if __name__ == "__main__":` around what it does'
                )
        elif self._is_async and len(pending) > 1:
            # Any of them may have blocked the event loop: alone, each is judged by itself.
            chunks.extendleft([index] for index in reversed(pending))
        elif pending:
            scores[pending[0]] = Score(None, {"success": 0.0, how: 1.0})
            self.num_timed_out += how == "timed_out"
            self.num_crashed += how == "crashed"
            if pending[1:]:
                chunks.appendleft(pending[1:])

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        if worker.is_ready and worker.process.pid is not None:
            with suppress(ProcessLookupError):  # programs that a verifier has started are in its process group
                os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join()
        worker.process.close()
        worker.connection.close()


def _imports_of_a_worker(score: ScoreFunction) -> list[str]:
    """Modules that the server process imports once for all workers: what `score` and the main module need.

    Each worker runs the main module again, and Ray's takes seconds to import. Naming `__main__` itself does nothing
    before Python 3.13 (https://github.com/python/cpython/issues/126631).
    """
    values = vars(sys.modules["__main__"]).values()
    modules = {value.__name__ for value in values if inspect.ismodule(value)}
    modules |= {value.__module__ for value in values if inspect.isclass(value) or inspect.isfunction(value)}
    modules |= {__name__, getattr(score, "__self__", score).__module__}
    return sorted(modules - {"__main__"})


def _limit_sending(connection: Connection, seconds: float) -> None:
    """Lets `send` raise BlockingIOError when the other side has read nothing for so long."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _end_with_the_pool() -> None:
    """Asks the kernel for a signal that ends this process, whatever it is doing, when the pool's process is gone."""
    pool = multiprocessing.parent_process()
    assert pool is not None
    # A pipe to which nothing is written; only its closing, with its other end, makes it readable.
    fcntl.fcntl(pool.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pool.sentinel, fcntl.F_SETFL, fcntl.fcntl(pool.sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _work(connection: Connection, pickled_score: bytes, time_limit_s: float) -> None:
    """A worker's life: loads the function, says that it is ready, and scores chunks until the pool is gone."""
    os.setpgrp()  # Ctrl-C reaches the whole process group of the program; here, the pool decides
    _end_with_the_pool()
    try:
        score = pickle.loads(pickled_score)
    except Exception:
        connection.send((None, traceback.format_exc()))
        return
    connection.send((None, None))
    try:
        if inspect.iscoroutinefunction(score):
            with asyncio.Runner() as runner:  # one event loop for good: HTTP clients belong to theirs
                while True:
                    runner.run(_score_together(connection, score, connection.recv(), time_limit_s))
        while True:
            for index, prompt, text in connection.recv():
                connection.send((index, _score_or_traceback(score, prompt, text)))
    except (EOFError, ConnectionError):
        return


def _score_or_traceback(score: Callable[[Prompt, str], Score], prompt: Prompt, text: str) -> Score | str:
    try:
        return score(prompt, text)
    except Exception:
        return f"row {prompt.row_id}, response {text[:200]!r}\n{traceback.format_exc()}"


async def _score_together(
    connection: Connection, score: Callable[[Prompt, str], Awaitable[Score]], chunk: Sequence[Any], time_limit_s: float
) -> None:
    """Scores the items of a chunk at the same time and sends each score when it is there."""

    async def score_one(index: int, prompt: Prompt, text: str) -> None:
        answer: Score | str
        try:
            answer = await asyncio.wait_for(score(prompt, text), time_limit_s)
        except TimeoutError:
            answer = Score(None, {"success": 0.0, "timed_out": 1.0})
        except Exception:
            answer = f"row {prompt.row_id}, response {text[:200]!r}\n{traceback.format_exc()}"
        connection.send((index, answer))

    await asyncio.gather(*(score_one(*item) for item in chunk))
