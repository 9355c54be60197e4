"""One thread that owns a vLLM engine and serves many.

vLLM's engine belongs to one thread. Requests that come in while others are under way join them at the next step, so
that calls of a few prompts each are batched together; everything else waits for its turn between two steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from threading import Condition, Thread
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """Builds an engine in a thread of its own and runs it there.

    Args:
        build: makes the `vllm.LLM`.

    Raises:
        BaseException: whatever `build` raises.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self._changed = Condition()
        self._new: deque[tuple[Any, Any, Future[Any]]] = deque()
        """Prompts with their parameters, not yet given to the engine."""
        self._calls: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()
        self._under_way: dict[str, Future[Any]] = {}
        """By request id."""
        self._ids = count()
        built: Future[None] = Future()
        Thread(target=self._run, args=(build, built), name="vllm engine", daemon=True).start()
        built.result()

    @property
    def num_under_way(self) -> int:
        """Requests that have not ended."""
        return len(self._new) + len(self._under_way)

    def generate(self, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        """vLLM's output for each prompt, in order. Raises what the engine raised."""
        futures: list[Future[Any]] = [Future() for _ in prompts]
        with self._changed:
            self._new.extend(zip(prompts, params, futures, strict=True))
            self._changed.notify()
        return [future.result() for future in futures]

    def call(self, function: Callable[[Any], T]) -> T:
        """What `function` makes of the `vllm.LLM`, between two steps."""
        future: Future[T] = Future()
        with self._changed:
            self._calls.append((function, future))
            self._changed.notify()
        return future.result()

    def _run(self, build: Callable[[], Any], built: Future[None]) -> None:
        try:
            llm = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._new or self._under_way)
                calls, self._calls = self._calls, deque()
                new, self._new = self._new, deque()
            for function, future in calls:
                _answer(future, partial(function, llm))
            for prompt, params, future in new:
                self._add(llm.llm_engine, prompt, params, future)
            if self._under_way:
                self._step(llm.llm_engine)

    def _add(self, engine: Any, prompt: Any, params: Any, future: Future[Any]) -> None:
        request_id = str(next(self._ids))
        try:
            engine.add_request(request_id, prompt, params)
        except BaseException as error:
            future.set_exception(error)
        else:
            self._under_way[request_id] = future

    def _step(self, engine: Any) -> None:
        try:
            for output in engine.step():
                if output.finished:
                    self._under_way.pop(output.request_id).set_result(output)
        except BaseException as error:
            # Nothing is known of any of them any more.
            failed, self._under_way = self._under_way, {}
            for future in failed.values():
                future.set_exception(error)


def _answer(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
