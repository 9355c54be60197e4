"""A user's own reward function: found by its name, called, and what it returns checked."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tenacity import AsyncRetrying, stop_after_attempt, wait_random_exponential

from expert_iteration.errors import Problem, UserError

KEY = "env.options.reward"
MAX_WAIT_S = 10.0
"""Longest pause between two attempts; the first is up to a second, and each may be twice as long as the one before."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What one function said about one response."""

    reward: float | None
    """None: unscored."""
    parts: dict[str, float]
    """What else it returned, by name; where it failed, why: `declined`, `invalid` or `raised`."""


@dataclass(frozen=True)
class RewardFunction:
    """`reward(response: str, row: dict) -> float | dict[str, float] | None`, sync or async, with its weight.

    It is pickled by its name. A worker process imports it at its start, where no time limit of an item counts.
    """

    location: str
    """package.module:function"""
    name: str
    weight: float
    attempts: int
    """Calls of an async function that raises, before its response is unscored."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        load_function(self.location)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(load_function(self.location))

    def call(self, response: str, row: Mapping[str, Any]) -> Verdict:
        """Never raises for what the function does; an async function runs in an event loop of another thread."""
        if self.is_async:
            return asyncio.run_coroutine_threadsafe(self.call_async(response, row), _event_loop()).result()
        try:
            returned = load_function(self.location)(response, dict(row))
        except Exception:
            return self._raised()
        return self._checked(returned)

    async def call_async(self, response: str, row: Mapping[str, Any]) -> Verdict:
        """The same within a running event loop; what an async function raises is retried with growing pauses."""
        if not self.is_async:
            return self.call(response, row)
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.attempts), wait=wait_random_exponential(max=MAX_WAIT_S), reraise=True
        )
        try:
            returned: Any = await retrying(load_function(self.location), response, dict(row))
        except Exception:
            return self._raised()
        return self._checked(returned)

    def returned_problem(self, returned: Any) -> str | None:
        """What is wrong with the type of a returned value; None for a number, a dict with a reward, or None."""
        if isinstance(returned, Mapping):
            if "reward" not in returned:
                return 'returned a dict without "reward"'
            named = {str(key): value for key, value in returned.items()}
            wrong = [key for key, value in named.items() if not _is_number(value) and (key, value) != ("reward", None)]
            return f"returned a dict whose {wrong[0]!r} is a {type(named[wrong[0]]).__name__}" if wrong else None
        if returned is None or _is_number(returned):
            return None
        return f"returned a {type(returned).__name__}"

    def _checked(self, returned: Any) -> Verdict:
        problem = self.returned_problem(returned)
        if problem is not None:
            _log_once(self.location, f"{problem}; its responses are unscored")
            return Verdict(None, {"invalid": 1.0})
        parts = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
        reward = parts.pop("reward")
        if reward is None:
            return Verdict(None, {"declined": 1.0})
        if not math.isfinite(reward) or not all(map(math.isfinite, parts.values())):
            _log_once(self.location, "returned NaN or infinity; its responses are unscored")
            return Verdict(None, {"invalid": 1.0})
        return Verdict(float(reward), {str(name): float(value) for name, value in parts.items()})

    def _raised(self) -> Verdict:
        _log_once(self.location, "raised; its responses are unscored", exc_info=True)
        return Verdict(None, {"raised": 1.0})


def load_function(location: Any, key: str = KEY) -> Callable[..., Any]:
    """Imports `package.module:function`; the folder that the program was started in is searched last. A class is a
    function here, and `key` the key of the config that names it.

    Raises UserError for a name that is no such thing or cannot be imported.
    """
    if (loaded := _LOADED.get(location)) is not None:
        return loaded
    module_name, colon, name = str(location).partition(":")
    if not colon or not module_name or not name:
        constraint = "has to be written as package.module:function"
        raise UserError(Problem(key, location, constraint, "name a function that Python can import"))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing a user's module runs any code
        complaint = f"cannot be imported ({type(error).__name__}: {error})"
        way_out = "correct it, or start in the folder that holds the module"
        raise UserError(Problem(key, location, complaint, way_out)) from error
    if not callable(function):
        raise UserError(Problem(key, location, "is no function", "name a function"))
    _LOADED[location] = function
    return function


_LOADED: dict[str, Callable[..., Any]] = {}
_LOGGED: set[tuple[str, str]] = set()
_LOOPS: list[asyncio.AbstractEventLoop] = []
_LOOP_LOCK = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop in which async functions run where they are called from a thread without one, or inside of one.

    It is the same for all calls, since a function's HTTP client belongs to the loop that it was first used in.
    """
    with _LOOP_LOCK:
        if not _LOOPS:
            _LOOPS.append(asyncio.new_event_loop())
            threading.Thread(target=_LOOPS[0].run_forever, name="async rewards", daemon=True).start()
        return _LOOPS[0]


def _is_number(value: Any) -> bool:
    """A float, an int or NumPy's; a bool is neither: whoever returns one may mean something else than 0 and 1."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _log_once(location: str, complaint: str, *, exc_info: bool = False) -> None:
    """A warning for the first response of its kind in each process; the counts are in the scores' details."""
    if (location, complaint) not in _LOGGED:
        _LOGGED.add((location, complaint))
        logger.warning("%s %s", location, complaint, exc_info=exc_info)
