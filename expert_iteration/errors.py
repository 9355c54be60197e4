"""The errors a run may end with, and the exit status that belongs to each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_COMPONENT_FAILED = 3
EXIT_OUT_OF_TIME = 124
"""As of the command `timeout`: train.max_time is over and the run is saved."""
EXIT_SIGHUP = 129
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the user's input."""

    key: str
    """The configuration key, with dots, or the file that is at fault."""
    value: Any
    """What the user gave."""
    constraint: str
    """What has to hold, as a sentence without a full stop."""
    way_out: str
    """What to do about it, as a sentence without a full stop."""

    def __str__(self) -> str:
        return f"{self.key}={self.value!s}: {self.constraint}; {self.way_out}."


class UserError(ValueError):
    """The user's input is wrong (exit status 2). Carries every problem found, not only the first."""

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise ValueError("UserError needs at least one Problem")
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class ComponentError(RuntimeError):
    """A part of the program failed while it ran (exit status 3)."""


class WeightSyncError(ComponentError):
    """The engine does not hold the weights that were published to it."""
