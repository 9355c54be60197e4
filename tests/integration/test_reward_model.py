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


def test_a_reward_model_scores_beside_the_training_of_an_adapter(run: Callable[..., FinishedRun], scorer: Path) -> None:
    """The overlapped collection is scored in a thread; the model changes nothing of what does not read its score."""
    overlapped = ["train.sync_iter=false", "train_model.lora.enabled=true", "inference_model.num_devices=2"]
    settings = [f"reward_model={scorer}", "reward_model.weight=1e-9", "reward_model.offload=true"]
    beside, without = run(*overlapped, *settings), run(*overlapped)
    assert len(beside.series("collection", "parts/reward_model")) == 2
    assert beside.series("collection", "reward/accuracy") == without.series("collection", "reward/accuracy")
    assert beside.parts.trainer.optimizer_steps > 0


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (["reward_model=./absent"], r"reward_model\.name=.*/absent: no such file or folder"),
        (["reward_model.weight=0.5"], r"reward_model\.weight=0\.5: there is no reward model to weigh"),
        (["reward_model=x", "reward_model.device=tpu"], r"reward_model\.device=tpu: has to be cpu, cuda"),
        (["reward_model=x", "reward_model.weight=0"], r"reward_model\.weight=0"),
    ],
)
def test_what_cannot_be_is_said(run: Callable[..., FinishedRun], wrong: list[str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        run(*wrong)


def score(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "responses.jsonl").write_text('{"row_id": 0, "response": "3"}\n{"row_id": 1, "response": "3"}\n')
    command = [sys.executable, str(ROOT / "scripts/score.py"), "responses.jsonl", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_file_is_scored_with_a_reward_model(scorer: Path, copy_task: Path, tmp_path: Path) -> None:
    task = [f"env.data_path={copy_task}", "env.prompt_template='{question}'"]
    done = score(tmp_path, *task, f"reward_model={scorer}", "--out", "scores.jsonl")
    assert done.returncode == 0, done.stderr
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert all("reward_model" in score["details"] for score in scores)
    assert "reward_model" in done.stdout and "task_reward" in done.stdout


def test_a_language_model_is_no_reward_model_to_the_script(tiny_model: Path, copy_task: Path, tmp_path: Path) -> None:
    done = score(tmp_path, f"env.data_path={copy_task}", f"reward_model={tiny_model}")
    assert done.returncode == 2
    assert f"reward_model.name={tiny_model}: it has 2 outputs, and a reward is one number" in done.stderr
