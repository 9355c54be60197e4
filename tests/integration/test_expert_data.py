"""A policy that cannot find the answer learns it from expert data, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task
from tests.integration.conftest import FinishedRun

LONG = ["inference_model.max_tokens=5", "env.prompt_template='{question}'", "selection.include_truncated=false"]


def write_experts(path: Path, copy_task: Path) -> Path:
    """Each training row's answer after four hashes, which the untrained model never writes, and the test rows' too."""
    task = make_task("gsm8k", data_path=str(copy_task), prompt_template="{question}")
    rows = [
        {"prompt": prompt.messages[0]["content"], "response": f"###{prompt.gold}", "source": "teacher"}
        for split in ("train", "test")
        for prompt in task.prompts(split)  # type: ignore[arg-type]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_policy_that_never_succeeds_learns_from_experts(
    run: Callable[..., FinishedRun], copy_task: Path, tmp_path: Path
) -> None:
    experts = write_experts(tmp_path / "experts.jsonl", copy_task)
    finished = run(
        *LONG,
        f"env.expert_data={experts}",
        "env.expert_share=0.25",
        "env.reward=exact",
        "eval.at_start=false",
        "eval.at_end=false",
        "train.epochs=2",
    )
    rows = [json.loads(line) for line in (finished.folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        sources = [rollout["source"] for rollout in row["rollouts"]]
        assert sources == ["policy"] * 16 + ["teacher"]
        assert row["rollouts"][16]["reward"] == 1.0
        assert sum(rollout["selected"] and rollout["source"] == "teacher" for rollout in row["rollouts"]) <= 1
    assert finished.series("collection", "expert/rollouts") == [8, 8]
    assert finished.series("collection", "expert/reward_mean") == [1.0, 1.0]
    assert sum(finished.series("collection", "expert/selected")) > 0
    assert finished.series("collection", "progress/dialog_turns") == [128, 256]
    losses = finished.series("step", "loss/main")
    assert losses[-1] < losses[0]
    differences = finished.series("step", "policy/engine_log_prob_difference")
    assert all(difference < 1e-3 for difference in differences)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (["env.expert_data=absent.jsonl"], r"env\.expert_data=absent\.jsonl: no such file"),
        (["env.expert_data=absent.jsonl", "env.expert_share=0.2"], r"env\.expert_share=0\.2: .*write at least 0\.25"),
        (["env.expert_share=0"], r"env\.expert_share"),
    ],
)
def test_what_cannot_be_is_said(run: Callable[..., FinishedRun], wrong: list[str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        run(*wrong)
