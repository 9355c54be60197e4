"""The user's own rows and reward functions, with hand-computed rewards and everything a function may get wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task, make_verifier, reward_function
from expert_iteration.tasks.base import is_held_out
from expert_iteration.types import Prompt, Score
from tests import reward_examples

HERE = "tests.reward_examples"
ROWS: list[dict[str, Any]] = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def custom(data: Path, reward: Any = f"{HERE}:right", **options: Any) -> Any:
    keys = {key: options.pop(key) for key in ("prompt_template", "train_size", "test_size") if key in options}
    mode = options.pop("mode", "graded")
    return make_task("custom", data_path=str(data), reward=mode, options={"reward": reward, **options}, **keys)


def test_rows_keep_every_column_and_split_by_a_hash_of_the_prompt(data: Path) -> None:
    task = custom(data)
    test, train = task.prompts("test"), task.prompts("train")
    assert sorted(prompt.row_id for prompt in (*train, *test)) == list(range(40))
    assert all(is_held_out(prompt.gold["prompt"], 0) for prompt in test) and test
    assert not any(is_held_out(prompt.gold["prompt"], 0) for prompt in train)
    assert [prompt.gold for prompt in train] == [ROWS[prompt.row_id] for prompt in train]
    assert train[0].messages == ({"role": "user", "content": ROWS[train[0].row_id]["prompt"]},)
    task.self_check()


def test_own_splits_stay_and_a_held_out_prompt_is_never_trained_on(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:3], ROWS[0]]))
    table = pyarrow.Table.from_pylist([{"prompt": " what is 1 + 1?", "answer": "2"}, ROWS[9]])
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")
    task = custom(tmp_path)
    assert [prompt.row_id for prompt in task.prompts("train")] == [0, 2]
    assert [prompt.row_id for prompt in task.prompts("test")] == [4, 5]


def test_a_data_set_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    for split, rows in (("train", ROWS[:5]), ("test", ROWS[5:7])):
        (tmp_path / "set" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"reward": f"{HERE}:right", "dataset": str(tmp_path / "set"), "gold": "answer"}
    task = make_task("custom", reward="graded", options=options)
    assert [prompt.gold for prompt in task.prompts("train")] == ROWS[:5]
    assert [prompt.row_id for prompt in task.prompts("test")] == [5, 6]
    task.self_check()


def test_chats_are_asked_as_they_are_and_texts_fill_the_template(data: Path, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(json.dumps({"ask": [chat[0], {"role": "user", "content": f"Hello {n}"}]}) + "\n" for n in range(40))
    )
    task = custom(path, f"{HERE}:brevity", prompt="ask")
    assert task.prompts("train")[0].messages[0] == chat[0]
    assert [m["role"] for m in task.prompts("test")[0].messages] == ["system", "user"]
    with pytest.raises(UserError, match=r"env\.prompt_template cannot fill in"):
        custom(path, f"{HERE}:brevity", prompt="ask", prompt_template="Q: {question}")
    templated = custom(data, prompt_template="Q: {question}").prompts("train")[0]
    assert templated.messages[0]["content"] == f"Q: {templated.gold['prompt']}"


@pytest.mark.parametrize(
    ("reward", "response", "rewards", "details"),
    [
        (f"{HERE}:right", "2", (1.0, 1.0), {"success": 1.0, "right": 1.0}),
        (f"{HERE}:right", "<think>so 3</think> 2", (1.0, 1.0), {"success": 1.0, "right": 1.0}),
        (f"{HERE}:right", "3", (0.0, 0.0), {"success": 0.0, "right": 0.0}),
        (f"{HERE}:brevity", "abc", (0.25, 0.0), {"success": 0.0, "brevity": 0.25, "brevity.length": 3.0}),
        # Its own success counts, not the threshold of 1.
        (f"{HERE}:own_success", "ba", (0.5, 1.0), {"success": 1.0, "own_success": 0.5, "own_success.success": 1.0}),
        # 0.75 * 1 + 2 * 1/2
        (
            [
                {"function": f"{HERE}:right", "weight": 0.75},
                {"function": f"{HERE}:brevity", "weight": 2, "name": "short"},
            ],
            "2",
            (1.75, 1.0),
            {"success": 1.0, "right": 1.0, "short": 0.5, "short.length": 1.0},
        ),
    ],
)
def test_rewards_by_hand(
    data: Path, reward: Any, response: str, rewards: tuple[float, float], details: dict[str, float]
) -> None:
    prompt = Prompt(0, (), {"answer": "2"})
    for mode, expected in zip(("graded", "exact"), rewards, strict=True):
        assert custom(data, reward, mode=mode).score(prompt, response) == Score(expected, details)


def test_a_perfect_response_is_a_success_whatever_the_weights_sum_to_in_floating_point(data: Path) -> None:
    functions = [{"function": f"{HERE}:right", "weight": weight, "name": str(weight)} for weight in (0.7, 0.2, 0.1)]
    score = custom(data, functions).score(Prompt(0, (), {"answer": "2"}), "2")
    assert 0.7 + 0.2 + 0.1 < 1.0 and score.details["success"] == 1.0


def test_the_threshold_of_a_success_and_reasoning_are_options(data: Path) -> None:
    prompt = Prompt(0, (), {"answer": "2"})
    task = custom(data, f"{HERE}:brevity", success_at=0.25, strip_reasoning=False)
    assert [task.score(prompt, text).details["success"] for text in ("abc", "abcd")] == [1.0, 0.0]
    assert task.score(prompt, "<think>").details["brevity.length"] == 7.0


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("nan", "invalid"), ("inf", "invalid"), ("true", "invalid"), ("tensor", "invalid"), ("text", "invalid"),
        ("list", "invalid"), ("no reward", "invalid"), ("bad part", "invalid"), ("nan part", "invalid"),
        ("none", "declined"), ("reward none", "declined"), ("unknown key", "raised"),
    ],
)  # fmt: skip
def test_what_is_no_reward_is_unscored_and_counted(data: Path, response: str, why: str) -> None:
    score = custom(data, f"{HERE}:returns").score(Prompt(0, (), {}), response)
    assert score == Score(None, {"success": 0.0, f"returns.{why}": 1.0})


def test_other_numbers_are_rewards(data: Path) -> None:
    task = custom(data, f"{HERE}:returns")
    assert [task.score(Prompt(0, (), {}), text).reward for text in ("int", "numpy")] == [2.0, 0.5]
    assert all(type(task.score(Prompt(0, (), {}), text).reward) is float for text in ("int", "numpy"))


def test_one_function_that_fails_leaves_the_response_unscored_and_the_others_logged(data: Path) -> None:
    task = custom(data, [f"{HERE}:brevity", f"{HERE}:returns"])
    score = task.score(Prompt(0, (), {}), "nan")
    assert score.reward is None
    assert score.details == {"success": 0.0, "brevity": 0.25, "brevity.length": 3.0, "returns.invalid": 1.0}


def test_a_function_that_changes_its_row_changes_a_copy(data: Path) -> None:
    prompt = Prompt(0, (), {"answer": "2"})
    custom(data, f"{HERE}:changes_its_row").score(prompt, "9")
    assert prompt.gold == {"answer": "2"}


def test_the_first_failure_is_shown_with_its_traceback_and_only_the_first(
    data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_function, "_LOGGED", set())
    task = custom(data, f"{HERE}:returns")
    for _ in range(3):
        task.score(Prompt(0, (), {}), "unknown key")
    assert caplog.text.count("raised; its responses are unscored") == 1
    assert "KeyError: 'unknown key'" in caplog.text


def test_self_check_calls_the_functions(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def check(rows: list[dict[str, str]], reward: str, **options: Any) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        custom(path, f"{HERE}:{reward}", **options).self_check()

    check(ROWS, "right", gold="answer")
    with pytest.raises(UserError, match=r"right\.raised.*row"):
        check([{"prompt": row["prompt"]} for row in ROWS], "right")
    with pytest.raises(UserError, match=r"row 0=.*gold response has to be a success"):
        check(ROWS, "brevity", gold="answer")
    with pytest.raises(UserError, match="an empty response must not be a success"):
        check(ROWS, "brevity")
    with pytest.raises(UserError, match=r"returns\.invalid"):
        check([row | {"say": "true"} for row in ROWS], "returns", gold="say")
    with pytest.raises(UserError, match='has to have a column "say"'):
        check(ROWS, "returns", gold="say")


@pytest.mark.parametrize(
    ("reward", "options", "match"),
    [
        (None, {}, "written as package.module:function"),
        ("right", {}, "written as package.module:function"),
        (f"{HERE}:wrong", {}, "cannot be imported.*no attribute 'wrong'"),
        ("no.such.module:right", {}, "cannot be imported.*No module named 'no'"),
        (f"{HERE}:NOT_A_FUNCTION", {}, "is no function"),
        ([], {}, "different names"),
        ([f"{HERE}:right", f"{HERE}:right"], {}, "different names"),
        ([{"function": f"{HERE}:right", "wieght": 1}], {}, "a weight and a name"),
        ([{"function": f"{HERE}:right", "weight": "1"}], {}, "a weight and a name"),
        ([{"function": f"{HERE}:right", "name": "success"}], {}, "none of success"),
        (f"{HERE}:right", {"sucess_at": 1}, "is no option of custom; choose among reward"),
        (f"{HERE}:right", {"success_at": "1"}, "has to be a number"),
        (f"{HERE}:right", {"concurrency": 0}, "at least 1"),
        (f"{HERE}:right", {"attempts": True}, "at least 1"),
        (f"{HERE}:right", {"dataset": "org/name"}, "set either env.data_path or env.options.dataset"),
        (f"{HERE}:right", {"prompt": "question"}, 'row 1=.*has to have a "question"'),
        (f"{HERE}:right", {"train_size": 41}, "has 3[0-9] distinct rows"),
    ],
)  # fmt: skip
def test_what_the_user_has_to_change_is_said(data: Path, reward: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        custom(data, reward, **options)


@pytest.mark.parametrize("content", ["", "[1]\n", "not json\n", '{"prompt": []}\n', '{"prompt": [{"role": "user"}]}\n'])
def test_unusable_rows_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        custom(tmp_path / "rows.jsonl")


def test_a_function_next_to_where_the_program_started_is_found(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_rewards.py").write_text("def half(response, row):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    task = custom(data, "my_own_rewards:half")
    verifier = make_verifier(task, workers=1, time_limit_s=5.0)
    assert verifier.score_many([(task.prompts("train")[0], "x")]) == [Score(0.5, {"success": 0.0, "half": 0.5})]
    verifier.close()


def test_async_functions_are_retried_and_combined_with_others(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_function, "MAX_WAIT_S", 0.01)
    reward_examples.ATTEMPTS.clear()
    prompt = Prompt(0, (), {"answer": "2"})
    task = custom(data, [f"{HERE}:fails_twice", f"{HERE}:right"])
    assert task.is_async
    assert task.score(prompt, "2") == Score(4.0, {"success": 1.0, "fails_twice": 3.0, "right": 1.0})
    impatient = custom(data, f"{HERE}:fails_twice", attempts=2)
    assert impatient.score(prompt, "7") == Score(None, {"success": 0.0, "fails_twice.raised": 1.0})


def test_async_functions_run_at_the_same_time_up_to_the_limit(data: Path) -> None:
    task = custom(data, f"{HERE}:slow", concurrency=4)
    verifier = make_verifier(task, workers=1, time_limit_s=5.0)
    scores = verifier.score_many([(prompt, "") for prompt in task.prompts("train")[:12]])
    verifier.close()
    assert max(score.reward or 0 for score in scores) == 4.0


def test_a_pool_scores_as_the_task_does_and_carries_no_rows(data: Path) -> None:
    task = custom(data, [f"{HERE}:right", f"{HERE}:brevity"])
    some = [(prompt, text) for prompt in task.prompts("train")[:10] for text in ("1", prompt.gold["answer"], "")]
    verifier = make_verifier(task, workers=2, time_limit_s=5.0)
    assert verifier.score_many(some) == [task.score(*item) for item in some]
    verifier.close()
    assert len(task.prompts("train")) > 10
    assert task.__getstate__()["_prompts"] == {"train": [], "test": []}


def test_the_import_of_a_function_is_under_no_time_limit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data.parent / "imported_slowly.py").write_text(
        "import time\ntime.sleep(1.5)\n\ndef reward(response, row):\n    return 0.5\n"
    )
    monkeypatch.chdir(data.parent)
    monkeypatch.setattr("sys.path", [*sys.path])
    task = custom(data, "imported_slowly:reward")
    verifier = make_verifier(task, workers=1, time_limit_s=1.0)
    try:
        assert [score.reward for score in verifier.score_many([(task.prompts("train")[0], "a")])] == [0.5]
    finally:
        verifier.close()
