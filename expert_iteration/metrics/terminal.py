"""What a run shows on the terminal: a live status at the bottom of a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from time import monotonic
from typing import Protocol, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from expert_iteration.metrics.sinks import Record
from expert_iteration.metrics.time_left import TimeLeft

PLAIN_WIDTH = 80

Field = tuple[str, str]
"""Glossary name, and how its value is written."""

COLLECTION_FIELDS: tuple[Field, ...] = (
    ("reward/mean", "reward {:.3f}"),
    ("reward/accuracy", "acc {:.3f}"),
    ("reward/pass_at_n", "pass@N {:.3f}"),
    ("selection/accepted_samples", "kept {:.0f}"),
    ("selection/tied_groups", "tied {:.0f}"),
    ("length/truncated_share", "cut {:.0%}"),
)
STEP_FIELDS: tuple[Field, ...] = (
    ("loss/total", "loss {:.4f}"),
    ("loss/kl_to_ref", "KL {:.4f}"),
    ("optim/grad_norm", "grad {:.2f}"),
    ("optim/learning_rate", "lr {:.1e}"),
)
EVAL_FIELDS: tuple[Field, ...] = (
    ("eval/num_problems", "problems {:.0f}"),
    ("eval/response_length_mean", "length {:.1f}"),
    ("eval/truncated_share", "truncated {:.1%}"),
)
LEARNING_FIELDS: tuple[Field, ...] = (
    ("progress/optimizer_step", "step {:.0f}"),
    ("reward/mean", "reward {:.3f}"),
    ("reward/accuracy", "accuracy {:.3f}"),
    ("loss/total", "loss {:.4f}"),
    ("loss/kl_to_ref", "KL {:.4f}"),
)
SPEED_FIELDS: tuple[Field, ...] = (
    ("perf/generation_tokens_per_second", "generate {:.0f} tokens/s"),
    ("perf/training_tokens_per_second", "{:.0f} trained"),
    ("memory/peak_gib", "peak {:.2f} GiB"),
)


class Terminal(Protocol):
    """What the log and the loop tell the user."""

    def start(self, total_collections: int) -> None:
        """The first collection begins; the time left is estimated from here on."""
        ...

    def show_stages(self, running: Sequence[str]) -> None:
        """These stages are running now."""
        ...

    def advance(self, progress: float) -> None:
        """A step is over, and the share `progress` of the run, in [0, 1], lies behind."""
        ...

    def show(self, record: Record) -> None:
        """A record of the log; every collection's has to come by, for the time left."""
        ...

    def print(self, content: RenderableType) -> None:
        """A message or a table that stays on the terminal."""
        ...

    def close(self) -> None:
        """Leaves the terminal as it was; a second call does nothing."""
        ...


def make_terminal(progress: str, file: TextIO | None = None) -> Terminal:
    """The display that `logging.progress` asks for, on `file` (standard output unless given)."""
    file = file or sys.stdout
    if isinstance(file, TextIOWrapper):
        # A model may write what the terminal's encoding does not have; that must not end the run.
        file.reconfigure(errors="backslashreplace")
    if progress == "live" or (progress == "auto" and file.isatty()):
        return LiveTerminal(Console(file=file, force_terminal=True, highlight=False, markup=False))
    elif progress in ("auto", "plain"):
        return PlainTerminal(file)
    else:
        raise ValueError(f"unknown terminal display {progress!r}")


class PlainTerminal:
    """Whole lines of at most 80 columns, without colours and control characters."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(
            file=file,
            width=PLAIN_WIDTH,
            force_terminal=False,
            color_system=None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._total_collections: int | None = None
        self._time_left: TimeLeft | None = None

    def start(self, total_collections: int) -> None:
        self._total_collections = total_collections
        self._time_left = TimeLeft(total_collections, monotonic())

    def show_stages(self, running: Sequence[str]) -> None:
        """Nothing: a line per stage would bury the others."""

    def advance(self, progress: float) -> None:
        if self._time_left is not None:
            self._time_left.trained(progress, monotonic())

    def show(self, record: Record) -> None:
        if record.kind == "collection" and self._time_left is not None:
            self._time_left.collected(monotonic())
        line = record_line(record, self._total_collections)
        if record.kind == "step" and self._time_left is not None:
            line += f"  left {format_seconds(self._time_left.seconds(monotonic()))}"
        self.print(line)

    def print(self, content: RenderableType) -> None:
        self._console.print(content, soft_wrap=isinstance(content, str))

    def close(self) -> None:
        """Nothing to undo."""


class LiveTerminal:
    """Three lines at the bottom of the terminal that are kept up to date; everything else scrolls by above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total_collections = 0
        self._progress = 0.0
        self._time_left: TimeLeft | None = None
        self._latest: dict[str, float] = {}
        self._stages: tuple[str, ...] = ()
        self._last_stages: tuple[str, ...] = ()
        self._stages_since = monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def start(self, total_collections: int) -> None:
        self._total_collections = total_collections
        self._time_left = TimeLeft(total_collections, monotonic())

    def show_stages(self, running: Sequence[str]) -> None:
        # A stage that only pauses between two steps goes on counting.
        if running and tuple(running) != self._last_stages:
            self._last_stages = tuple(running)
            self._stages_since = monotonic()
        self._stages = tuple(running)

    def advance(self, progress: float) -> None:
        self._progress = progress
        if self._time_left is not None:
            self._time_left.trained(progress, monotonic())

    def show(self, record: Record) -> None:
        self._latest.update(record.values)
        if record.kind == "collection" and self._time_left is not None:
            self._time_left.collected(monotonic())
        if record.kind != "step":
            self.print(record_line(record, self._total_collections))

    def print(self, content: RenderableType) -> None:
        self._console.print(content, soft_wrap=isinstance(content, str))

    def close(self) -> None:
        self._stages = ()
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The status as it is now; called at every refresh."""
        now = monotonic()
        bar = Table.grid(padding=(0, 1))
        bar.add_column(width=1)
        bar.add_column(width=20, no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.expand = True
        running = " + ".join(self._stages)
        left = self._time_left.seconds(now) if self._time_left is not None else None
        bar.add_row(
            self._spinner if running else "",
            f"{running} {now - self._stages_since:.0f} s" if running else "",
            ProgressBar(total=1.0, completed=self._progress),
            f"{self._progress:4.0%}  left {format_seconds(left)}",
        )
        lines = (format_fields(self._latest, LEARNING_FIELDS), format_fields(self._latest, SPEED_FIELDS))
        yield Group(bar, *(Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in lines))


def record_line(record: Record, total_collections: int | None) -> str:
    """One line of at most 80 columns, without what the record does not hold."""
    values = record.values
    if record.kind == "collection":
        number = f"{values['progress/collection'] + 1:.0f}"
        head = f"{number}/{total_collections}" if total_collections else number
        return f"[{head}]  {format_fields(values, COLLECTION_FIELDS)}"
    elif record.kind == "step":
        return f"  step {values['progress/optimizer_step']:.0f}  {format_fields(values, STEP_FIELDS)}"
    elif record.kind == "eval":
        interval = f"accuracy {values['eval/accuracy']:.3f} [{values['eval/low']:.3f}, {values['eval/high']:.3f}]"
        return f"eval  {interval}  {format_fields(values, EVAL_FIELDS)}"
    else:
        raise ValueError(f"unknown kind of record {record.kind!r}")


def format_fields(values: Mapping[str, float], fields: Sequence[Field]) -> str:
    return "  ".join(template.format(values[name]) for name, template in fields if name in values)


def format_seconds(seconds: float | None) -> str:
    """m:ss, or h:mm:ss from an hour on; --:-- when unknown."""
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
