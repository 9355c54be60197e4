"""Weights of the graded reward's components, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from expert_iteration.config.task_defaults import REWARD_WEIGHTS
from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task
from expert_iteration.tasks.reward_mix import RewardMix


def test_a_weighted_mean_by_hand() -> None:
    mix = RewardMix({"correct": 0.75, "short": 0.25}, {})
    assert mix({"correct": 1.0, "short": 0.0}) == 0.75
    assert mix({"correct": 0.0, "short": 0.5}) == 0.125
    # 3 of 3 + 1: what is left out keeps its own weight.
    assert RewardMix({"correct": 3.0, "short": 0.25}, {"short": 1})({"correct": 1.0, "short": 0.0}) == 0.75
    # Only one component is left.
    assert RewardMix({"correct": 0.75, "short": 0.25}, {"correct": 0})({"correct": 0.0, "short": 0.5}) == 0.5


@pytest.mark.parametrize("weights", [*REWARD_WEIGHTS.values(), {"a": 0.8, "b": 0.1, "c": 0.1}, {"a": 1e-9, "b": 7.3}])
def test_all_components_give_exactly_one(weights: dict[str, float]) -> None:
    assert RewardMix(weights, {})(dict.fromkeys(weights, 1.0)) == 1.0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"style": 1.0}, r"env\.reward_weights\.style=1\.0: .*choose among correct, short"),
        ({"short": -0.1}, r"env\.reward_weights\.short=-0\.1: has to be a finite number of at least 0"),
        ({"short": math.nan}, r"env\.reward_weights\.short=nan"),
        ({"short": True}, r"env\.reward_weights\.short=True"),
        ({"short": "1"}, r"env\.reward_weights\.short=1"),
        ({"short": 0, "correct": 0}, "one weight at least has to be above 0"),
    ],
)
def test_weights_that_cannot_be(given: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        RewardMix({"correct": 0.75, "short": 0.25}, given)


def test_weights_reach_the_tasks_and_only_those_that_have_components(tmp_path: Path) -> None:
    row = '{"question": "Eight nines?", "answer": "#### 72"}\n'
    (tmp_path / "train.jsonl").write_text(row)
    (tmp_path / "test.jsonl").write_text(row.replace("Eight", "Two"))
    task = make_task(
        "gsm8k",
        data_path=str(tmp_path),
        reward="graded",
        reward_weights={"correct": 0.5, "length": 0.5, "format": 0, "closeness": 0},
        options={"length_limit": 3},
    )
    prompt = task.prompts("train")[0]
    assert [task.score(prompt, text).reward for text in ("72", "it is 72", "8", "none")] == [1.0, 0.5, 0.5, 0.0]
    with pytest.raises(UserError, match=r"env\.options\.length_limit=0"):
        make_task("gsm8k", data_path=str(tmp_path), options={"length_limit": 0})
    with pytest.raises(UserError, match=r"env\.reward_weights=.*reasoning_gym has no components"):
        make_task("reasoning_gym", reward_weights={"correct": 1.0}, options={"generator": "chain_sum"})
