"""Whole runs with a reward model, beside the task's reward and alone, and the script that scores a file with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from expert_iteration.errors import UserError
from tests.integration.conftest import ROOT, FinishedRun
from tests.tiny import CHARACTERS, SPECIAL


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A tiny reward model with the tokenizer of the tiny policy."""
    folder = tmp_path_factory.mktemp("scorer")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(SPECIAL + CHARACTERS), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_a_reward_model_beside_the_task(run: Callable[..., FinishedRun], scorer: Path) -> None:
    finished = run(f"reward_model={scorer}", "reward_model.task_weight=0.5", "reward_model.weight=0.1")
    rows = [json.loads(line) for line in (finished.folder / "samples.jsonl").read_text().splitlines()]
    for rollout in (rollout for row in rows for rollout in row["rollouts"]):
        details = rollout["details"]
        assert rollout["reward"] == pytest.approx(0.5 * details["task_reward"] + 0.1 * details["reward_model"])
    means = finished.series("collection", "parts/reward_model")
    assert len(means) == 2 and means[0] != 0
    assert finished.series("collection", "parts/task_reward") == finished.series("collection", "reward/accuracy")
    assert finished.result.after is not None


def test_a_reward_model_alone(run: Callable[..., FinishedRun], scorer: Path) -> None:
    finished = run(f"reward_model.name={scorer}", "reward_model.task_weight=0", "reward_model.transform=sigmoid")
    rewards = finished.series("collection", "reward/mean")
    assert rewards == finished.series("collection", "parts/reward_model")
    assert all(0 < reward < 1 for reward in rewards)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (["reward_model=./absent"], r"reward_model\.name=\./absent: there is no such folder"),
        (["reward_model.weight=0.5"], r"reward_model\.weight=0\.5: there is no reward model to weigh"),
        (["reward_model=x", "reward_model.device=tpu"], r"reward_model\.device=tpu: has to be cpu, cuda"),
        (["reward_model=x", "reward_model.weight=0"], r"reward_model\.weight=0"),
    ],
)
def test_what_cannot_be_is_said(run: Callable[..., FinishedRun], wrong: list[str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        run(*wrong)


def test_a_file_is_scored_with_a_reward_model(scorer: Path, copy_task: Path, tmp_path: Path) -> None:
    (tmp_path / "responses.jsonl").write_text('{"row_id": 0, "response": "3"}\n{"row_id": 1, "response": "3"}\n')
    command = [
        sys.executable, str(ROOT / "scripts/score.py"), "responses.jsonl", f"env.data_path={copy_task}",
        "env.prompt_template='{question}'", f"reward_model={scorer}", "--out", "scores.jsonl",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert all("reward_model" in score["details"] for score in scores)
    assert "reward_model" in done.stdout and "task_reward" in done.stdout
