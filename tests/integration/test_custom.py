"""The loop with a user's reward in worker processes. Run: pytest tests/integration/test_custom.py"""

from __future__ import annotations

import json
import multiprocessing

import pytest

REWARD = "env.options={{reward: tests.reward_examples:{}, prompt: question}}"


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    digits = "3578"
    rows = [{"question": f"{n:06b} ".replace("0", "?").replace("1", "#") + digits[n % 4]} for n in range(60)]
    path.write_text("".join(json.dumps(row | {"answer": row["question"][-1]}) + "\n" for row in rows))
    return path


def test_a_tiny_model_learns_from_a_users_reward(run, rows):
    finished = run(
        "env.dataset=custom", f"env.data_path={rows}", REWARD.format("mentions"), "env.verifier_workers=1",
        "env.prompt_template=null", "train.total_dialog_turns=640",
    )  # fmt: skip
    accuracies = finished.series("collection", "reward/accuracy")
    assert accuracies[-1] > 2 * accuracies[0] > 0
    assert finished.series("collection", "selection/unscored_samples") == [0] * 5
    assert multiprocessing.active_children() == []
    rollout = json.loads((finished.folder / "samples.jsonl").read_text().splitlines()[0])["rollouts"][0]
    assert rollout["details"].keys() == {"success", "mentions"}


def test_a_reward_that_hangs_at_times_costs_those_samples_alone(run, rows):
    finished = run(
        "env.dataset=custom", f"env.data_path={rows}", REWARD.format("hangs_on_3"), "env.verifier_workers=2",
        "env.verifier_time_limit_s=0.5", "env.prompt_template=null", "train.total_dialog_turns=128",
        "selection.above=none", "eval.at_start=false", "eval.at_end=false",
    )  # fmt: skip
    groups = [json.loads(line) for line in (finished.folder / "samples.jsonl").read_text().splitlines()]
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    hung = [rollout for rollout in rollouts if rollout["text"].startswith("3")]
    assert hung and len(hung) < len(rollouts)
    assert all(rollout["reward"] is None and rollout["details"]["timed_out"] for rollout in hung)
    assert finished.series("collection", "selection/unscored_samples") == [len(hung)]
    assert not any(rollout["selected"] for rollout in hung)
    assert multiprocessing.active_children() == []
