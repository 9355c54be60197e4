"""Every benchmark runs at its smallest size and writes its figures; none of them is looked at here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import buffer, iteration_costs, memory, profiles, reference, scaling, training, weight_sync


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
    figures: Any = run(buffer.main, tmp_path, "--tiny", "--sizes", "20", "40", "--batch", "8")
    assert [row["size"] for row in figures["sizes"]] == [20, 40]
    assert all(row.keys() >= buffer.COLUMNS.keys() for row in figures["sizes"])
    assert "later draw" in capsys.readouterr().out


def test_buffer_refuses_sizes_without_a_second_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        buffer.main(["--sizes", "127"])
    assert "fewer than two batches of 64" in capsys.readouterr().err


def test_memory(tmp_path: Path) -> None:
    figures: Any = run(memory.main, tmp_path, "--tiny")
    assert len(figures["bytes"]) == 4
    assert figures["marks"] == {"4": figures["bytes"][-1]}
    assert figures["optimizer_steps"] >= figures["publishes"] > 0


def test_the_slope_is_that_of_a_line_after_a_run_has_settled() -> None:
    before, after = [0, 10**6] * (memory.SETTLED // 2), [5000 + 30 * number for number in range(250)]
    assert memory.slope_of(before + after) == pytest.approx(30)


def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures: Any = run(scaling.main, tmp_path, "--tiny", "--prompts", "2", "3", "--new-tokens", "3", "2000")
    names = ["base", "samples 3", "prompts 3", "prompt tokens 6", "new tokens 3"]
    assert list(figures["cases"]) == names  # the base once, and nothing that the model has no room for
    assert figures["cases"]["prompts 3"].items() > {"samples": 2, "prompts": 3, "prompt_tokens": 4}.items()
    assert "2000 new tokens" in capsys.readouterr().err


def test_the_work_of_generation_counts_a_prompt_once_and_no_token_that_is_not_fed_back() -> None:
    case = {"samples": 2, "prompts": 3, "prompt_tokens": 5, "new_tokens": 4}
    # Through the layers 3 prompts of 5 and 6 samples of 3 tokens: 33; to the vocabulary 3 + 18 positions: 21.
    figures = scaling.rate(case, seconds=2.0, weights=(10, 100), flops=1000.0)
    assert figures["matmul_share"] == pytest.approx(2 * (10 * 33 + 100 * 21) / 2.0 / 1000.0)
    assert figures["tokens_per_second"] == 12.0


def test_reference(tmp_path: Path) -> None:
    figures: Any = run(reference.main, tmp_path, "--tiny")
    assert figures["tokens"] > figures["response_tokens"] > 0
    for layout in reference.LAYOUTS:
        row = figures["layouts"][layout]
        assert row["reference_of_step"] == pytest.approx(row["reference_seconds"] / row["step_seconds"])
        assert row["tokens_per_second"] == pytest.approx(figures["tokens"] / row["reference_seconds"])


def test_weight_sync(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures: Any = run(weight_sync.main, tmp_path, "--tiny")
    for method in weight_sync.METHODS:
        row = figures["methods"][method]
        seconds = row["seconds"]
        assert seconds[weight_sync.ITERATION] == pytest.approx(seconds["generation"] + seconds["training"])
        assert row["sum_of_parts"] == pytest.approx(sum(seconds[name] for name in weight_sync.SYNC_PARTS))
    assert figures["methods"]["full"]["num_weights"] == figures["methods"]["lora"]["num_weights"]
    assert "iteration measured" in capsys.readouterr().out


def test_weight_sync_against_a_named_iteration(tmp_path: Path) -> None:
    figures: Any = run(weight_sync.main, tmp_path, "--tiny", "--methods", "lora", "--iteration-seconds", "5")
    row = figures["methods"]["lora"]
    assert row["seconds"][weight_sync.ITERATION] == 5.0
    assert row["of_iteration"][weight_sync.PUBLISH] == pytest.approx(row["seconds"][weight_sync.PUBLISH] / 5)


def test_a_benchmark_can_be_started_as_a_file_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(Path(buffer.__file__)), "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "--tiny" in finished.stdout


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
