"""The one place that metrics go through on their way to file, terminal and wandb."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType

from expert_iteration.metrics.glossary import check_names
from expert_iteration.metrics.sinks import JsonlFile, Kind, Record, WandbRun
from expert_iteration.metrics.terminal import Terminal


class MetricsLogger:
    """Writes every record to metrics.jsonl, and thinned ones to the terminal and wandb.

    with MetricsLogger(path, terminal=terminal, wandb_run=None, logging_frequency=10) as logger:
        with logger.stage("generate"):
            ...
        logger.log("collection", {"reward/mean": 0.4, **logger.take_stage_seconds()}, optimizer_step=0, collection=0)

    `elapsed` are the seconds that a resumed run had run before.
    """

    def __init__(
        self,
        path: Path,
        *,
        terminal: Terminal,
        wandb_run: WandbRun | None,
        logging_frequency: int,
        elapsed: float = 0.0,
    ) -> None:
        self.terminal = terminal
        self._file = JsonlFile(path)
        self._wandb_run = wandb_run
        self._logging_frequency = logging_frequency
        self._start = perf_counter() - elapsed
        self._running_stages: list[str] = []
        self._stage_seconds: dict[str, float] = {}
        self._lock = Lock()
        """Held while the two above change: stages of a collection sampled ahead run in another thread."""
        self._writing = Lock()
        """Held while a record is written: the collector's come from a thread of their own."""
        self._closed = False

    @property
    def elapsed(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return perf_counter() - self._start

    @property
    def wandb_run_id(self) -> str | None:
        """By which wandb knows the run; None where it is off."""
        return None if self._wandb_run is None else self._wandb_run.run_id

    def log(self, kind: Kind, values: Mapping[str, float], *, optimizer_step: int, collection: int) -> None:
        """Writes one record; a name that the glossary does not hold raises ValueError.

        Steps whose number logging_frequency does not divide stay off the terminal and wandb, and the collector's
        records off the terminal. May be called from several threads. A step's "progress/run"
        moves the progress bar whether or not the step is shown.
        """
        record = Record(
            kind,
            {
                "progress/optimizer_step": optimizer_step,
                "progress/collection": collection,
                "time/elapsed": self.elapsed,
                **values,
            },
        )
        check_names(record.values)
        with self._writing:
            self._file.write(record)
            if kind == "step" and "progress/run" in values:
                self.terminal.advance(values["progress/run"])
            if kind != "step" or optimizer_step % self._logging_frequency == 0:
                if kind != "collector":
                    self.terminal.show(record)
                if self._wandb_run is not None:
                    self._wandb_run.write(record)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Shows the stage on the terminal while it runs, and adds its seconds to time/`name`.

        Stages may overlap, in other threads too, as long as no two of the same name do.
        """
        check_names([f"time/{name}"])
        with self._lock:
            self._running_stages.append(name)
            self.terminal.show_stages(self._running_stages)
        start = perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}"
            with self._lock:
                self._stage_seconds[key] = self._stage_seconds.get(key, 0.0) + perf_counter() - start
                self._running_stages.remove(name)
                self.terminal.show_stages(self._running_stages)

    def take_stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage that ended since the last call, as `time/*`."""
        with self._lock:
            taken, self._stage_seconds = self._stage_seconds, {}
        return taken

    def close(self) -> None:
        """Closes file, terminal and wandb; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._file.close()
            self.terminal.close()
            if self._wandb_run is not None:
                self._wandb_run.close()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
