"""A policy that cannot find the answer learns it from expert data, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task
from tests.integration.conftest import FinishedRun

REWARD = {"reward": "tests.reward_examples:right", "prompt": "question"}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A task whose answers an untrained model never writes: ##N## for the digit N of the question, and nothing else."""
    path = tmp_path / "rows.jsonl"
    questions = [f"{number:06b} ".replace("0", "?").replace("1", "#") + "3578"[number % 4] for number in range(60)]
    # The tiny tokenizer decodes with a space between characters.
    rows = [{"question": question, "answer": f"# # {question[-1]} # #"} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def experts(tmp_path: Path, rows: Path) -> Path:
    """The right answer and a wrong one to each row, held-out rows included, one too long and one to no row."""
    answers = [json.loads(line) for line in rows.read_text().splitlines()]
    written = [
        {"prompt": row["question"], "response": response, "source": source}
        for row in answers
        for response, source in ((row["answer"].replace(" ", ""), "teacher"), ("##0##", "pupil"))
    ]
    training = make_task("custom", data_path=str(rows), options=REWARD).prompts("train")[0]
    written += [{"row_id": training.row_id, "response": "#" * 9}, {"prompt": "??? 9", "response": "##9##"}]
    path = tmp_path / "experts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return path


@pytest.fixture
def run_with_experts(run: Callable[..., FinishedRun], rows: Path, experts: Path) -> Callable[..., FinishedRun]:
    def start(*more: str) -> FinishedRun:
        return run(
            "env.dataset=custom",
            f"env.data_path={rows}",
            "env.options={reward: tests.reward_examples:right, prompt: question}",
            "env.prompt_template=null",
            "env.verifier_workers=0",
            f"env.expert_data={experts}",
            "env.expert_share=0.25",
            "inference_model.max_tokens=6",
            "eval.at_start=false",
            "eval.at_end=false",
            *more,
        )

    return start


def groups(finished: FinishedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (finished.folder / "samples.jsonl").read_text().splitlines()]


def test_a_policy_that_never_succeeds_learns_from_experts_alone(
    run_with_experts: Callable[..., FinishedRun], rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished = run_with_experts("train.epochs=2")
    task = make_task("custom", data_path=str(rows), options=REWARD)
    num_train, num_test = len(task.prompts("train")), len(task.prompts("test"))
    collected = groups(finished)
    assert len(collected) == 16
    for group in collected:
        assert [rollout["source"] for rollout in group["rollouts"]] == ["policy"] * 16 + ["teacher", "pupil"]
        assert [rollout["reward"] for rollout in group["rollouts"]] == [0.0] * 16 + [1.0, 0.0]
        assert [rollout["selected"] for rollout in group["rollouts"]] == [False] * 16 + [True, False]
        assert group["rollouts"][16]["text"] == group["gold"]["answer"]
        assert group["rollouts"][16]["tokens"] == 6 and not group["rollouts"][16]["truncated"]
    expected = {
        "expert/rollouts": 16,
        "expert/unscored_rollouts": 0,
        "expert/reward_mean": 0.5,
        "expert/selected": 8,
        "expert/selected_share": 1.0,
        "expert/dropped_held_out": 2 * num_test,
        "expert/dropped_unmatched": 1,
        "expert/dropped_too_long": 1,
        "reward/accuracy": 0.0,
        "reward/pass_at_n": 0.0,
        "reward/max": 0.0,
        "selection/accepted_samples": 8,
        "buffer/reward_mean": 1.0,
    }
    for name, value in expected.items():
        assert finished.series("collection", name) == [value, value], name
    assert finished.series("collection", "progress/dialog_turns") == [128, 256]
    losses = finished.series("step", "loss/main")
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    # No engine has sampled what is trained on, so there is nothing to compare the trainer's log-probs with.
    assert finished.series("step", "policy/engine_log_prob_difference") == []
    told = f"{2 * num_train} responses to {num_train} training prompts; left out: {2 * num_test} to held-out prompts"
    assert capfd.readouterr().out.count(told) == 1


@pytest.mark.parametrize(
    "settings",
    [
        ["train.prioritized_sampling=true", "train.prioritized_sampling_beta=0.5", "train.loss_function=minor_sft"],
        ["train_model.lora.enabled=true", "train.sync_iter=false", "train.buffer_size=64"],
        ["selection.strategy=random", "selection.above=none", "train.empty_replay_buffer=false"],
        ["train.packing=true", "train.loss_normalization=token", "train_model.num_devices=2"],
    ],
)
def test_expert_data_goes_with_the_other_settings(
    run_with_experts: Callable[..., FinishedRun], settings: list[str]
) -> None:
    finished = run_with_experts(*settings)
    collected = groups(finished)
    assert len(collected) == 16
    for group in collected:
        assert sum(rollout["selected"] and rollout["source"] != "policy" for rollout in group["rollouts"]) <= 1
    assert sum(finished.series("collection", "expert/selected")) > 0
    for name in ("loss/total", "loss/kl_to_ref", "optim/grad_norm"):
        assert all(isinstance(value, float) for value in finished.series("step", name)), name  # NaN is logged as null
    assert all(difference < 1e-3 for difference in finished.series("step", "policy/engine_log_prob_difference"))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (["env.expert_data=absent.jsonl"], r"env\.expert_data=.*absent\.jsonl: no such file"),
        (["env.expert_share=0.2"], r"env\.expert_share=0\.2: .*write at least 0\.25"),
        (["env.expert_share=0"], r"env\.expert_share"),
        (["env.expert_share=1.5"], r"env\.expert_share"),
        (["inference_model.max_tokens=5"], r"env\.expert_data=.*no row can be used.*left out: .* above"),
    ],
)
def test_what_cannot_be_is_said(run_with_experts: Callable[..., FinishedRun], wrong: list[str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        run_with_experts(*wrong)
