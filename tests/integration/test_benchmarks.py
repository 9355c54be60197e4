"""Every benchmark runs at its smallest size and writes its figures; none of them is looked at here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import buffer, iteration_costs, memory, profiles, scaling, training


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(main: Callable[[list[str]], int], tmp_path: Path, *arguments: str) -> dict[str, object]:
    out = tmp_path / "figures.json"
    assert main(["--repeats", "1", "--threads", "1", "--out", str(out), *arguments]) == 0
    figures: dict[str, object] = json.loads(out.read_text())
    assert figures["machine"]
    return figures


def test_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(buffer.main, tmp_path, "--sizes", "70", "200")
    assert [row["size"] for row in figures["sizes"]] == [70, 200]  # type: ignore[attr-defined]
    assert "later draw" in capsys.readouterr().out


def test_memory(tmp_path: Path) -> None:
    assert len(run(memory.main, tmp_path, "--iterations", "4")["bytes"]) == 4  # type: ignore[arg-type]


def test_scaling(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "BASE", {"prompts": 2, "samples": 2, "prompt tokens": 4, "new tokens": 2})
    monkeypatch.setattr(scaling, "VARIED", dict.fromkeys(scaling.BASE, (1, 3)))
    figures = run(scaling.main, tmp_path, "--model", str(tiny_model))
    assert {case["varied"] for case in figures["cases"]} == set(scaling.VARIED)  # type: ignore[attr-defined]


def test_profiles(tmp_path: Path, tiny_model: Path) -> None:
    sizes = ["--prompt-tokens", "4", "--max-tokens", "4", "--response-tokens", "4", "--vocabulary", "16"]
    figures = run(profiles.main, tmp_path, "--model", str(tiny_model), *sizes)
    assert set(figures["training step"]) == {*profiles.KINDS, profiles.REST}  # type: ignore[call-overload]


def test_iteration_costs(tmp_path: Path, overrides: list[str]) -> None:
    figures = run(iteration_costs.main, tmp_path, "--config-name", "ei_gsm8k", "--overrides", *overrides)
    assert set(iteration_costs.SYNC_PARTS) < set(figures["seconds"])  # type: ignore[call-overload]


def test_training(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "VARIANTS", ("plain", "ours, packed, shared prompts"))
    sizes = [
        "--sequences",
        "2",
        "--per-prompt",
        "2",
        "--prompt-tokens",
        "4",
        "--response-tokens",
        "4",
        "--vocabulary",
        "16",
    ]
    figures = run(training.main, tmp_path, "--model", str(tiny_model), "--lengths", "fixed", *sizes)
    assert set(figures["tables"]["fixed"]) == set(training.VARIANTS)  # type: ignore[index]
