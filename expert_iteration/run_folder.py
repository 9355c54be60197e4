"""The folder of a run: one process at a time writes to it, and a resumed run goes on in it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from expert_iteration.errors import Problem, UserError

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CHECKPOINTS = "checkpoints"
FINISHED_FILE = "FINISHED"
"""Is there once the run has come to its end."""
LOCK_FILE = ".lock"
LOCK_LIMIT_S = 5.0
"""How long a process that has just been killed may keep the lock through processes that it started."""


def claim(run_dir: Path, *, resumed: bool, may_begin_again: bool = False) -> FileLock:
    """Takes the folder for this process, and for a new run starts its log; the lock that has to be released.

    The lock belongs to the process: the operating system gives it back however the process ends.

    Args:
        run_dir: of the run.
        resumed: the run goes on, and so does its log.
        may_begin_again: a new run may take the folder of one that was cut short before there was anything to go on
            from. The logs of that one are put aside.

    Raises:
        UserError: another process works in the folder, or a new run finds the log of another one: two starts in one
            second have the same folder.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_dir / LOCK_FILE, timeout=LOCK_LIMIT_S)
    try:
        lock.acquire()
    except Timeout as error:
        way_out = "wait until it has ended, or end it"
        raise UserError(Problem("hydra.run.dir", run_dir, "another process works in this folder", way_out)) from error
    if resumed:
        return lock
    if may_begin_again and not (run_dir / FINISHED_FILE).exists():
        _put_logs_aside(run_dir)
    try:
        (run_dir / METRICS_FILE).open("x").close()
    except FileExistsError as error:
        lock.release()
        way_out = "start again, name another, or go on with it by resume=auto"
        raise UserError(Problem("hydra.run.dir", run_dir, "another run has written to this folder", way_out)) from error
    return lock


def _put_logs_aside(run_dir: Path) -> None:
    """Into cut_short_1, cut_short_2, ..."""
    logs = [log for name in (SAMPLES_FILE, METRICS_FILE) if (log := run_dir / name).exists()]
    if not logs:
        return
    aside = run_dir / f"cut_short_{len(list(run_dir.glob('cut_short_*'))) + 1}"
    aside.mkdir()
    for log in logs:
        log.rename(aside / log.name)
    print(f"The run that was cut short here before its first checkpoint begins again; its logs are in {aside}.")


def trim(run_dir: Path, *, metrics_bytes: int, samples_bytes: int, collections: int) -> None:
    """Cuts both logs back to what they were when a checkpoint was taken, so that no step is logged twice.

    The collector's lines come from a thread of their own: those of collections that were not stored yet
    (index `collections` and above) go as well, for they will be made again.
    """
    metrics = run_dir / METRICS_FILE
    lines = metrics.read_bytes()[:metrics_bytes].splitlines(keepends=True)
    kept = [line for line in lines if not _is_of_later_collection(line, collections)]
    new = metrics.with_name(f".{METRICS_FILE}.new")
    new.write_bytes(b"".join(kept))
    new.replace(metrics)
    samples = run_dir / SAMPLES_FILE
    if samples.exists():
        os.truncate(samples, min(samples_bytes, samples.stat().st_size))


def remove_leftovers(checkpoint_dir: Path) -> None:
    """Removes what a process that was killed in the middle of a save has left; only for who holds the lock."""
    for folder in checkpoint_dir.glob(".checkpoint_*-*"):
        shutil.rmtree(folder, ignore_errors=True)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def _is_of_later_collection(line: bytes, collections: int) -> bool:
    record = json.loads(line)
    return record["kind"] == "collector" and record["progress/collection"] >= collections
