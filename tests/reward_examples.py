"""Reward functions as a user writes them, right and wrong; worker processes import them from here."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import torch

ATTEMPTS: dict[str, int] = {}
IN_FLIGHT = {"now": 0, "most": 0}


def right(response: str, row: dict[str, Any]) -> float:
    return float(response.strip() == row["answer"])


def mentions(response: str, row: dict[str, Any]) -> float:
    return float(row["answer"] in response)


def brevity(response: str, row: dict[str, Any]) -> dict[str, float]:
    return {"reward": 1 / (1 + len(response)), "length": len(response)}


def own_success(response: str, row: dict[str, Any]) -> dict[str, float]:
    return {"reward": 0.25 * len(response), "success": float("a" in response)}


def changes_its_row(response: str, row: dict[str, Any]) -> float:
    row["answer"] = response
    return 0.0


def returns(response: str, row: dict[str, Any]) -> Any:
    """What the response names; 0 for an empty one."""
    return {
        "": 0.0,
        "nan": math.nan,
        "inf": math.inf,
        "none": None,
        "true": True,
        "tensor": torch.tensor(1.0),
        "text": "1.0",
        "list": [1.0],
        "no reward": {"score": 1.0},
        "bad part": {"reward": 1.0, "part": None},
        "nan part": {"reward": 1.0, "part": math.nan},
        "reward none": {"reward": None},
        "int": 2,
        "numpy": np.float32(0.5),
    }[response]


def hangs_on_3(response: str, row: dict[str, Any]) -> float:
    while response.startswith("3"):
        pass
    return float(len(response))


async def slow(response: str, row: dict[str, Any]) -> float:
    IN_FLIGHT["now"] += 1
    IN_FLIGHT["most"] = max(IN_FLIGHT.values())
    await asyncio.sleep(0.1)
    IN_FLIGHT["now"] -= 1
    return float(IN_FLIGHT["most"])


async def fails_twice(response: str, row: dict[str, Any]) -> float:
    """A service that answers the third call for each response."""
    ATTEMPTS[response] = ATTEMPTS.get(response, 0) + 1
    if ATTEMPTS[response] < 3:
        raise ConnectionError("service unavailable")
    return float(ATTEMPTS[response])


NOT_A_FUNCTION = 1
