"""The self-check of data and reward: what fails, what is dropped, and what a verifier that is too kind gets."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task, make_verifier
from expert_iteration.tasks.self_check import check_answers, settle
from expert_iteration.types import Prompt, Score

PROMPTS = [
    Prompt(index, ({"role": "user", "content": f"Q{index}"},), gold) for index, gold in enumerate(["a", "b", "a", "c"])
]


class Verifier:
    """Remembers what it was asked."""

    def __init__(self, right: Any) -> None:
        self.right = right
        self.asked: list[tuple[int, str]] = []

    def __call__(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        self.asked += [(prompt.row_id, response) for prompt, response in items]
        return [Score(float(self.right(*item)), {"success": 0.0}) for item in items]


def failures(right: Any, **arguments: Any) -> list[tuple[int, str]]:
    found = check_answers(PROMPTS, Verifier(right), lambda answer: f"<{answer}>", **arguments)
    return [(failure.row_id, failure.problem.constraint.partition(",")[0]) for failure in found]


def test_what_is_tried_with_each_row_by_hand() -> None:
    verifier = Verifier(lambda prompt, response: response == f"<{prompt.gold}>")
    assert check_answers(PROMPTS, verifier, lambda answer: f"<{answer}>") == []
    assert [response for row_id, response in verifier.asked if row_id == 0] == ["", "<a>", "<b>", "<c>", "<a1>"]
    assert [response for row_id, response in verifier.asked if row_id == 3] == ["", "<c>", "<a>", "<b>", "<c1>"]


def test_a_verifier_that_accepts_everything_is_found_out() -> None:
    assert failures(lambda prompt, response: response != "") == [
        (row_id, "responses of other rows must not all score the maximum of 1") for row_id in range(4)
    ]
    assert (0, "an empty response must not score the maximum of 1") in failures(lambda prompt, response: True)


def test_one_other_answer_may_be_right_too() -> None:
    assert failures(lambda prompt, response: response in (f"<{prompt.gold}>", "<b>")) == []


def test_a_gold_answer_that_is_not_right_names_its_row() -> None:
    constraint = "its gold response has to score the maximum of 1"
    assert failures(lambda prompt, response: response == "<a>" == f"<{prompt.gold}>") == [
        (1, constraint),
        (3, constraint),
    ]


def test_rows_without_gold_are_tried_with_nothing() -> None:
    assert failures(lambda prompt, response: response == "" and prompt.row_id == 2, gold_of=lambda prompt: None) == [
        (2, "an empty response must not score the maximum of 1")
    ]


def test_negatives_may_be_limited_but_every_gold_answer_is_tried() -> None:
    verifier = Verifier(lambda prompt, response: response == f"<{prompt.gold}>")
    check_answers(PROMPTS, verifier, lambda answer: f"<{answer}>", max_negatives=2)
    assert [row_id for row_id, response in verifier.asked if response == ""] == [0, 2]
    assert {row_id for row_id, response in verifier.asked if response == f"<{PROMPTS[row_id].gold}>"} == {0, 1, 2, 3}


def test_the_only_answer_of_all_rows_is_tried_corrupted() -> None:
    same = [Prompt(0, PROMPTS[0].messages, "5"), Prompt(1, PROMPTS[1].messages, "5")]
    assert check_answers(same, Verifier(lambda prompt, response: response == "5"), str) == []
    (first, second) = check_answers(same, Verifier(lambda prompt, response: response.startswith("5")), str)
    assert (first.row_id, second.row_id) == (0, 1)


def test_settling_raises_or_drops_and_never_leaves_a_split_empty(caplog: pytest.LogCaptureFixture) -> None:
    found = check_answers(PROMPTS, Verifier(lambda prompt, response: response == "<a>"), lambda answer: f"<{answer}>")
    splits: Any = {"train": PROMPTS[:3], "test": PROMPTS[3:]}
    with pytest.raises(UserError) as caught:
        settle(splits, found, drop=False)
    assert [problem.key for problem in caught.value.problems] == ["row 1", "row 3"]
    with pytest.raises(UserError, match="row 3"):
        settle(splits, found, drop=True)
    splits = {"train": PROMPTS[:2], "test": [PROMPTS[2], PROMPTS[3]]}
    with caplog.at_level(logging.WARNING):
        kept = settle(splits, found, drop=True)
    assert {split: [prompt.row_id for prompt in kept[split]] for split in kept} == {"train": [0], "test": [2]}
    assert "dropped 2 unusable rows" in caplog.text and "row 1=" in caplog.text


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_unusable_rows_stop_the_run_or_are_dropped_by_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [{"question": f"{n} and one?", "answer": f"#### {n + 1}"} for n in range(4)]
    write(tmp_path / "train.jsonl", [good[0], {"question": "No answer?"}, "text", good[1]])
    write(tmp_path / "test.jsonl", good[2:])
    with pytest.raises(UserError) as caught:
        make_task("gsm8k", data_path=str(tmp_path))
    assert [problem.key.rpartition("/")[2] for problem in caught.value.problems] == [
        "train.jsonl row 2",
        "train.jsonl row 3",
    ]
    with caplog.at_level(logging.WARNING):
        task: Any = make_task("gsm8k", data_path=str(tmp_path), invalid_rows="drop")
    # Ids are positions in the data, whatever was dropped.
    assert [prompt.row_id for prompt in (*task.prompts("train"), *task.prompts("test"))] == [0, 3, 4, 5]
    assert task.num_invalid == 2
    assert "dropped 2 unusable rows" in caplog.text and "train.jsonl row 2" in caplog.text


def test_rows_that_fail_the_self_check_are_dropped_by_key(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"Say {word}.", "gold": word, "answer": word} for word in map(str, range(30))]
    rows[4]["answer"] = "something else"
    write(tmp_path / "rows.jsonl", rows)
    options = {"reward": "tests.reward_examples:right", "gold": "gold"}
    with pytest.raises(UserError, match=r"row 4='4': its gold response has to be a success") as caught:
        make_task("custom", data_path=str(tmp_path / "rows.jsonl"), options=options).self_check()
    assert len(caught.value.problems) == 1
    task: Any = make_task("custom", data_path=str(tmp_path / "rows.jsonl"), options=options, invalid_rows="drop")
    task.self_check()
    assert task.num_invalid == 1
    assert 4 not in [prompt.row_id for prompt in (*task.prompts("train"), *task.prompts("test"))]


def test_EI_29_a_function_that_hangs_fails_the_check_within_its_limit(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"prompt": f"Say {n}.", "gold": "hang" if n == 3 else "x"} for n in range(12)])
    options = {"reward": "tests.slow_verifiers:hangs_when_asked", "gold": "gold"}
    task = make_task("custom", data_path=str(tmp_path / "rows.jsonl"), options=options)
    verifier = make_verifier(task, workers=1, time_limit_s=1.0)
    try:
        with pytest.raises(
            UserError, match=r"row 3='hang': its gold response has to be a success, and it got timed_out"
        ):
            task.self_check(verifier.score_many)
    finally:
        verifier.close()
