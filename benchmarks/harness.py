"""What the benchmarks share: sides that take turns, the machine's matmul rate, peak memory, tables and JSON.

Every ratio comes from one run: the variants take turns, so that a slow moment of the machine meets all of them, and
their medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
ROOT = Path(__file__).parents[1]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--repeats", type=int, default=5, help="measured repeats of each variant, after one that warms up"
    )
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--out", type=Path, help="file for the figures as JSON")
    return made


class Side:
    """A worker process, which waits until it is its turn: one line of JSON for each question, one for each answer.

    Args:
        name: of the side, for the message when it ends early.
        worker: the program, which is told `setting` first.
        setting: what it answers for.
        python: its interpreter; this one's by default.
        preload: a library for LD_PRELOAD.
    """

    def __init__(
        self,
        name: str,
        worker: Path,
        setting: Mapping[str, Any],
        python: str = sys.executable,
        preload: Path | None = None,
    ) -> None:
        environment = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [python, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._name = name
        self.ask(setting)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._name} ended with status {self._process.wait()}; its own message stands above")
        return dict(json.loads(answer))

    def close(self) -> None:
        """Ends the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def interleave(runs: Mapping[str, Callable[[int], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, by name, `repeats` of each in turn. Repeat 0 of each warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = perf_counter()
            run(repeat)
            if repeat > 0:
                seconds[name].append(perf_counter() - start)
    return seconds


def matmul_rate(dtype: torch.dtype, size: int = 2048, repeats: int = 9) -> float:
    """FLOP/s of a product of two square matrices with the current number of threads: what a share is a share of."""
    a, b = torch.randn(2, size, size).to(dtype)
    times = []
    for _ in range(repeats):
        start = perf_counter()
        a @ b
        times.append(perf_counter() - start)
    return 2 * size**3 / median(times)


def num_matmul_weights(model: torch.nn.Module) -> tuple[int, int]:
    """Weights that one token is multiplied with: those of the layers, and those of the vocabulary projection."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers: list[Tensor] = [
        module.weight
        for module in model.modules()
        if module is not head and getattr(module, "weight", None) is not None and module.weight.ndim == 2
        if not isinstance(module, torch.nn.Embedding)
    ]
    return sum(weight.numel() for weight in layers), head.weight.numel()


def resident_bytes(field: str = "VmRSS") -> int:
    """A memory field of this process: VmRSS now, VmHWM the peak since `reset_peak`."""
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    assert match is not None
    return int(match.group(1)) * 1024


def reset_peak() -> None:
    """Lets VmHWM count from here."""
    Path("/proc/self/clear_refs").write_text("5")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title and columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

    return "\n".join([title, line(header), *map(line, rows)])


def write_json(path: Path | None, args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Writes the arguments, the machine and the figures; nothing without a path."""
    if path is None:
        return
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    machine = {
        "cpu": cpu.group(1) if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    document = {"setting": vars(args), "machine": machine, **result}
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")
