"""Verifiers and reward functions that misbehave on request; worker processes import them from here."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from typing import Any

from expert_iteration.types import Prompt, Score

LEAK: list[bytes] = []


def score_by_text(prompt: Prompt, text: str) -> Score:
    """The length of the text; `sleep`, `spin`, `exit` and `raise` do as they say.

    `program` starts one that sleeps, `alarm` has a time limit of its own before it hangs, and `deaf` is done, but keeps
    the interpreter to itself from then on.
    """
    if text == "sleep":
        time.sleep(60)
    elif text == "spin":
        while True:
            pass
    elif text == "exit":
        os._exit(7)
    elif text == "program":
        return Score(float(subprocess.Popen(["sleep", "60"]).pid))
    elif text == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        signal.alarm(0)
        _keep_the_interpreter()
    elif text == "deaf":
        threading.Timer(0.1, _keep_the_interpreter).start()
    elif text == "raise":
        raise RuntimeError("a bug in the verifier")
    elif text == "pid":
        return Score(float(os.getpid()), {"main_thread": float(threading.current_thread() is threading.main_thread())})
    elif text == "leak":
        LEAK.append(bytes(100_000))
        return Score(float(len(LEAK)))
    return Score(float(len(text)), {"success": float(text == prompt.gold)})


def _keep_the_interpreter() -> None:
    """Exponential time in C, with the interpreter lock held."""
    re.match(r"(a+)+$", "a" * 60 + "b")


async def score_in_time(prompt: Prompt, text: str) -> Score:
    """Takes 0.2 s; `hang` waits for ever and `block` does so without letting others run."""
    if text == "hang":
        await asyncio.sleep(60)
    elif text == "block":
        time.sleep(60)
    await asyncio.sleep(0.2)
    return Score(float(len(text)))


class Unloadable:
    """Pickles, and cannot be loaded again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()

    def __call__(self, prompt: Prompt, text: str) -> Score:
        raise AssertionError("never loaded")


def _refuse() -> None:
    raise ImportError("no such verifier")


def hangs_when_asked(response: str, row: dict[str, Any]) -> float:
    """1 for any text; waits for ever for `hang`."""
    if response == "hang":
        time.sleep(60)
    return float(response in ("x", "hang"))
