"""Where records go: the file metrics.jsonl and Weights & Biases. (The terminal has its own module.)"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal

Kind = Literal["step", "collection", "collector", "eval"]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log."""

    kind: Kind
    values: Mapping[str, float]
    """By glossary name; always with progress/optimizer_step, progress/collection and time/elapsed."""


class JsonlFile:
    """Appends one JSON object per record and hands each line to the operating system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        """NaN and infinities, which JSON does not have, become null."""
        values = {name: value if isfinite(value) else None for name, value in record.values.items()}
        self._file.write(json.dumps({"kind": record.kind, **values}, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; null is read as NaN."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        kind = values.pop("kind")
        records.append(Record(kind, {name: nan if value is None else value for name, value in values.items()}))
    return records


class WandbRun:
    """A Weights & Biases run that never stops the training: its first failure is reported, and it is off from then on.

    Records are plotted over progress/optimizer_step and not over wandb's own step, which would drop a record whose step
    had been logged before.
    """

    def __init__(
        self,
        *,
        mode: str,
        project: str,
        name: str,
        directory: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        run_id: str | None = None,
    ) -> None:
        """`mode` is offline or online; `directory` gets wandb's own folder; `config` is shown with the run; `warn` gets
        the one warning; `run_id` is that of a run to go on with."""
        if mode not in ("offline", "online"):
            raise ValueError(f"mode={mode!r}: one of offline, online")
        self._warn = warn
        self._run: Any = None
        self.run_id = run_id
        """By which wandb knows the run."""
        with self._off_at_failure():
            import wandb

            directory.mkdir(parents=True, exist_ok=True)
            # wandb's own lines would break the live display.
            settings = wandb.Settings(silent=True, console="off")
            run = wandb.init(
                mode="online" if mode == "online" else "offline",
                project=project,
                name=name,
                dir=str(directory),
                config=dict(config),
                settings=settings,
                id=run_id,
                resume=None if run_id is None else "allow",
            )
            self.run_id = run.id
            run.define_metric("progress/optimizer_step")
            run.define_metric("*", step_metric="progress/optimizer_step")
            self._run = run

    @property
    def active(self) -> bool:
        """Whether records still reach wandb."""
        return self._run is not None

    def write(self, record: Record) -> None:
        if self._run is not None:
            with self._off_at_failure():
                self._run.log(dict(record.values))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with self._off_at_failure():
                run.finish()

    @contextmanager
    def _off_at_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._run = None
            self._warn(f"wandb failed, the run goes on without it ({type(error).__name__}: {error})")
