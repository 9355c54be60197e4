"""Where a run stands, in plain numbers that a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """A run between two optimizer steps."""

    collection: int = 0
    """Index of the collection that is being trained on, or of the next one."""
    is_stored: bool = False
    """Whether it is in the buffer."""
    has_samples: bool = False
    """Whether any of it was kept."""
    steps: int = 0
    """Optimizer steps that were taken on it."""
    steps_due: int = 0
    """Of the steps that it pays for: mode=async with train.weight_update_frequency."""
    unspent_samples: int = 0
    """Samples that may still be drawn once these steps are done."""
    planned_steps_before: int = 0
    """Planned steps of all earlier collections."""
    dialog_turns: int = 0
    empty_in_a_row: int = 0
    writes: int = 0
    """Samples that were stored."""
    evicted: int = 0
    reissued: int = 0
    """Completions that were too old and asked for again."""
    unpublished_steps: int = 0
    reward: float | None = None
    """Mean reward of the last collection that has one."""

    def next_collection(self, planned_steps: int) -> None:
        """Done with the collection."""
        self.planned_steps_before += planned_steps
        self.collection += 1
        self.is_stored = self.has_samples = False
        self.steps = self.steps_due = 0
