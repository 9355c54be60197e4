"""GSM8K: rows from files, splits by text, reward with hand-computed parts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_iteration.config.task_defaults import REWARD_WEIGHTS
from expert_iteration.errors import UserError
from expert_iteration.tasks import make_task
from expert_iteration.tasks.gsm8k import GSM8K, ends_with_answer_line, gold_number
from expert_iteration.tasks.reward_mix import RewardMix
from expert_iteration.types import Prompt

DATA_DIR = Path(os.environ.get("EI_DATA_DIR", Path(__file__).parents[2].parent / "shared" / "data")) / "gsm8k"


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row(question: str, gold: str) -> dict[str, str]:
    return {"question": question, "answer": f"Because of this and that.\n#### {gold}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl", [row("One and one?", "2"), row("Eight nines?", "72"), row("Half?", "0.5")])
    write_rows(tmp_path / "test.jsonl", [row("Two and two?", "4"), row("Thousand?", "1,000")])
    return tmp_path


def texts(task: Any, split: Any) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in task.prompts(split)]


def load(path: Path, **arguments: Any) -> GSM8K:
    return GSM8K(data_path=str(path), prompt_template="{question}", **arguments)


def test_rows_keep_their_order_and_ids_are_unique_over_splits(folder: Path) -> None:
    task = load(folder)
    assert texts(task, "train") == ["One and one?", "Eight nines?", "Half?"]
    assert [prompt.row_id for prompt in task.prompts("train")] == [0, 1, 2]
    assert [prompt.row_id for prompt in task.prompts("test")] == [3, 4]
    assert [prompt.gold for prompt in task.prompts("test")] == ["4", "1000"]
    assert task.prompts("train") is task.prompts("train")
    task.self_check()


def test_the_default_template_asks_for_the_answer_line(folder: Path) -> None:
    task = make_task("gsm8k", data_path=str(folder))
    (message,) = task.prompts("train")[0].messages
    assert message["role"] == "user"
    assert message["content"].startswith("One and one?") and "#### <number>" in message["content"]


@pytest.mark.parametrize(
    ("response", "exact", "graded", "details"),
    [
        ("8 * 9 = 72\n#### 72", 1.0, 1.0, (1, 1, 1, 1)),
        ("It is 72.", 1.0, 0.9, (1, 0, 1, 1)),
        # Off by 18 of 72: closeness 3/4. 0.1 + 0.05 * 3/4 + 0.05
        ("#### 90", 0.0, 0.1875, (0, 1, 0.75, 1)),
        ("perhaps 90", 0.0, 0.0875, (0, 0, 0.75, 1)),
        ("#### 72 or 73", 0.0, 0.05, (0, 0, 0, 1)),
        ("", 0.0, 0.0, (0, 0, 0, 0)),
        ("no idea", 0.0, 0.0, (0, 0, 0, 0)),
        ("<think>\n#### 72", 0.0, 0.0, (0, 0, 0, 0)),
        # One character more than the limit, reasoning included: 1 - 0.05.
        ("x" * 1993 + "\n#### 72", 1.0, 0.95, (1, 1, 1, 0)),
        ("x" * 1992 + "\n#### 72", 1.0, 1.0, (1, 1, 1, 1)),
    ],
)
def test_reward_by_hand(
    folder: Path, response: str, exact: float, graded: float, details: tuple[float, float, float, float]
) -> None:
    names = ("success", "format", "closeness", "length")
    for reward, expected in (("exact", exact), ("graded", graded)):
        task = load(folder, reward=reward)
        score = task.score(task.prompts("train")[1], response)
        assert score.reward == pytest.approx(expected, abs=1e-12)
        assert score.details == dict(zip(names, details, strict=True))


def test_no_wrong_answer_earns_more_than_a_fifth(folder: Path) -> None:
    task = load(folder, reward="graded")
    prompt = Prompt(0, (), "1000000")
    near_miss, right = task.score(prompt, "#### 999999").reward, task.score(prompt, "1000000").reward
    assert near_miss is not None and right is not None
    assert 0.19 < near_miss < 0.2 < right


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("#### 72", True),
        ("a\n####$1,000\n\n", True),
        ("#### 72<|im_end|>", True),
        ("#### 72\nThat is all.", False),
        ("so #### 72", False),
        ("##### 72", False),
        ("####", False),
        ("72", False),
    ],
)
def test_answer_line(response: str, expected: bool) -> None:
    assert ends_with_answer_line(response) is expected


def test_EI_27_gold_survives_hashes_twice() -> None:
    assert gold_number("#### 5\nno\n#### 7") == "7"
    assert gold_number("a\n#### $1,234.50") == "1234.50"
    assert gold_number("72") is None
    assert gold_number("#### five") is None
    assert gold_number("#### 5 or 7") is None


def test_EI_08_the_same_question_with_another_answer_stays_a_row_of_its_own(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [row("Q", "1"), row("Q", "2"), row(" q ", "1.0"), row("R", "3")])
    write_rows(tmp_path / "test.jsonl", [row("S", "4"), row("s", "4")])
    task = load(tmp_path)
    assert [(prompt.row_id, prompt.gold) for prompt in task.prompts("train")] == [(0, "1"), (1, "2"), (3, "3")]
    assert [task.score(prompt, "#### 2").reward for prompt in task.prompts("train")] == [0.0, 1.0, 0.0]
    assert len(task.prompts("test")) == 1
    assert (task.num_duplicates, task.num_held_out) == (2, 0)


def test_a_held_out_question_is_no_training_question(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [row("Q", "1"), row("Held  out", "2"), row("held out", "3")])
    write_rows(tmp_path / "test.jsonl", [row("held out", "2")])
    task = load(tmp_path)
    assert texts(task, "train") == ["Q"]
    assert task.num_held_out == 2


def test_one_file_is_split_by_text_whatever_the_order(tmp_path: Path) -> None:
    rows = [row(f"Question {index}?", str(index)) for index in range(200)]
    write_rows(tmp_path / "a.jsonl", rows)
    write_rows(tmp_path / "b.jsonl", rows[::-1] + rows[:50])
    first, second = load(tmp_path / "a.jsonl"), load(tmp_path / "b.jsonl")
    assert set(texts(first, "test")) == set(texts(second, "test"))
    assert set(texts(first, "train")) == set(texts(second, "train"))
    assert 20 <= len(first.prompts("test")) <= 60  # a fifth of 200, within 3.5 standard deviations
    assert len(first.prompts("test")) + len(first.prompts("train")) == 200
    assert not set(texts(first, "train")) & set(texts(first, "test"))


def test_sizes_take_the_first_rows(folder: Path) -> None:
    task = load(folder, train_size=2, test_size=1)
    assert texts(task, "train") == ["One and one?", "Eight nines?"]
    assert [prompt.row_id for prompt in task.prompts("test")] == [3]


def test_more_rows_than_there_are_is_an_error_for_each_split(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(folder, train_size=4, test_size=5)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("env.train_size", 4),
        ("env.test_size", 5),
    ]
    assert "at most 3" in caught.value.problems[0].way_out


def test_parquet_files_and_the_folders_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for number, question in enumerate(["One?", "Two?"]):
        table = pyarrow.Table.from_pylist([row(question, str(number + 1))])
        pyarrow.parquet.write_table(table, tmp_path / "main" / f"train-0000{number}-of-00002.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row("Three?", "3")]), tmp_path / "main" / "test.parquet")
    task = load(tmp_path)
    assert [(prompt.row_id, prompt.gold) for prompt in task.prompts("train")] == [(0, "1"), (1, "2")]
    assert [(prompt.row_id, prompt.gold) for prompt in task.prompts("test")] == [(2, "3")]


def test_every_bad_row_is_named_with_its_file(folder: Path) -> None:
    good = json.dumps(row("Fine?", "1"))
    bad = [
        "{broken",
        '["a list"]',
        json.dumps({"answer": "#### 1"}),
        json.dumps({"question": "No answer?"}),
        json.dumps({"question": "No number?", "answer": "#### none"}),
        "1" * 5000,
    ]
    (folder / "train.jsonl").write_text("\n".join([good, *bad, good]) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert [problem.key for problem in caught.value.problems] == [
        f"{folder / 'train.jsonl'} row {number}" for number in range(2, 8)
    ]
    constraints = [problem.constraint for problem in caught.value.problems]
    assert "JSON" in constraints[0] and "question" in constraints[2] and "answer" in constraints[3]
    assert "####" in constraints[4]


def test_at_most_twenty_bad_rows_are_listed(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"question": "Q"}] * 50)
    with pytest.raises(UserError) as caught:
        load(tmp_path / "rows.jsonl")
    assert len(caught.value.problems) == 20


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"PAR1 not really"], ids=["empty", "binary", "parquet"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / ("rows.parquet" if content.startswith(b"PAR1") else "rows.jsonl")
    file.write_bytes(content)
    with pytest.raises(UserError, match="rows"):
        load(file)


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_path_without_data_is_an_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path / path)
    assert {problem.key for problem in caught.value.problems} == {"env.data_path"}


def test_a_hub_out_of_reach_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        make_task("gsm8k")
    assert [problem.key for problem in caught.value.problems] == ["env.data_path"]
    assert "openai/gsm8k" in caught.value.problems[0].constraint


@pytest.mark.parametrize(
    "template", ["no question", "{question} {x}", "{question} {", "{question} {0}", "{question.x}"]
)
def test_a_bad_prompt_template_is_an_error(folder: Path, template: str) -> None:
    with pytest.raises(UserError) as caught:
        make_task("gsm8k", data_path=str(folder), prompt_template=template)
    assert [problem.key for problem in caught.value.problems] == ["env.prompt_template"]


def test_braces_in_template_and_question(folder: Path) -> None:
    write_rows(folder / "train.jsonl", [row("What is {x}?", "1")])
    task = make_task("gsm8k", data_path=str(folder), prompt_template="{question} Write \\boxed{{n}}.")
    assert texts(task, "train") == ["What is {x}? Write \\boxed{n}."]


def test_make_task_refuses_unknown_names_and_options(folder: Path) -> None:
    with pytest.raises(UserError, match=r"env\.dataset=gsm9k.*reasoning_gym, countdown, gsm8k"):
        make_task("gsm9k")
    with pytest.raises(UserError, match=r"env\.reward=best"):
        make_task("gsm8k", data_path=str(folder), reward="best")
    with pytest.raises(UserError, match=r"env\.options\.level"):
        make_task("gsm8k", data_path=str(folder), options={"level": 3})


def test_self_check_names_row_and_question(folder: Path) -> None:
    task = load(folder)
    task.prompts("train")
    task._prompts["train"][1] = Prompt(1, ({"role": "user", "content": "Eight nines?"},), "seventy-two")
    with pytest.raises(UserError, match=r"row 1=.*Eight nines"):
        task.self_check()


@given(st.text(max_size=60), st.sampled_from(["", "#### ", "\\boxed{", "<answer>"]))
@settings(max_examples=300, deadline=None)
def test_score_never_raises_and_stays_in_range(text: str, prefix: str) -> None:
    task = GSM8K.__new__(GSM8K)
    task._graded, task._length_limit, task._mix = True, 2000, RewardMix(REWARD_WEIGHTS["gsm8k"], {})
    score = task.score(Prompt(0, (), "72"), prefix + text)
    assert score.reward is not None and 0.0 <= score.reward <= 1.0
    assert (score.reward > 0.2) == (score.details["success"] == 1.0)


@pytest.mark.skipif(not DATA_DIR.is_dir(), reason="the GSM8K files are not there (EI_DATA_DIR)")
def test_the_real_data_passes_its_self_check() -> None:
    task = GSM8K(data_path=str(DATA_DIR), reward="graded")
    assert (len(task.prompts("train")), len(task.prompts("test"))) == (7473, 1319)
    assert (task.num_duplicates, task.num_held_out) == (0, 0)
    task.self_check()
    solutions = [json.loads(line)["answer"] for line in (DATA_DIR / "test.jsonl").read_text("utf-8").splitlines()]
    assert len(solutions) == 1319
    for prompt, solution in zip(task.prompts("test"), solutions, strict=True):
        assert task.score(prompt, solution).reward == 1.0
