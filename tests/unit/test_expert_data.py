"""Expert data: which rows are used, how they are encoded, and what is left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
from transformers import AutoTokenizer

from expert_iteration.chat import ChatEncoder
from expert_iteration.errors import UserError
from expert_iteration.expert_data import ExpertData, load_expert_data
from expert_iteration.tasks import make_task
from expert_iteration.types import Task
from tests.tiny import save_tiny_model, write_copy_task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = write_copy_task(tmp_path_factory.mktemp("copy"), rows=12)
    return make_task("gsm8k", data_path=str(folder), prompt_template="Say: {question}", train_size=10)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return ChatEncoder(AutoTokenizer.from_pretrained(folder), "plain")


def load(tmp_path: Path, task: Task, encoder: ChatEncoder, rows: list[Any], max_tokens: int = 8) -> ExpertData:
    path = tmp_path / "experts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_expert_data(path, task, encoder, max_tokens=max_tokens)


def test_rows_are_matched_by_id_by_question_and_by_message(tmp_path: Path, task: Task, encoder: ChatEncoder) -> None:
    first, second, third = task.prompts("train")[:3]
    question = second.messages[0]["content"].removeprefix("Say: ")
    data = load(
        tmp_path,
        task,
        encoder,
        [
            {"row_id": first.row_id, "response": "3"},
            {"prompt": question, "response": "5", "source": "anna"},
            {"prompt": third.messages[0]["content"], "response": "7"},
            {"row_id": first.row_id, "response": "4"},
            {"row_id": first.row_id, "response": "3", "source": "again"},
        ],
    )
    by_row = {row: [(r.response_ids, r.source) for r in responses] for row, responses in data.responses.items()}
    eos = 2
    three, four, five, seven = (encoder.tokenizer.convert_tokens_to_ids(digit) for digit in "3457")
    assert by_row == {
        first.row_id: [((three, eos), "expert"), ((four, eos), "expert")],
        second.row_id: [((five, eos), "anna")],
        third.row_id: [((seven, eos), "expert")],
    }
    assert (data.num_held_out, data.num_unmatched, data.num_too_long) == (0, 0, 0)


def test_what_is_left_out_is_counted(tmp_path: Path, task: Task, encoder: ChatEncoder) -> None:
    train, test = task.prompts("train"), task.prompts("test")
    data = load(
        tmp_path,
        task,
        encoder,
        [
            {"row_id": train[0].row_id, "response": "3"},
            {"row_id": test[0].row_id, "response": "3"},
            {"prompt": test[1].messages[0]["content"], "response": "3"},
            {"row_id": 10, "response": "3"},  # env.train_size cuts it off
            {"prompt": "Say: something else", "response": "3"},
            {"row_id": train[1].row_id, "response": "3" * 8},  # nine tokens with the end token
            {"row_id": train[1].row_id, "response": "3" * 7},
        ],
    )
    assert (data.num_held_out, data.num_unmatched, data.num_too_long) == (2, 2, 1)
    assert sorted(data.responses) == [train[0].row_id, train[1].row_id]
    assert "2 to held-out prompts, 2 to no training prompt, 1 above" in str(data)
    assert data.metrics() == {
        "expert/dropped_held_out": 2,
        "expert/dropped_unmatched": 2,
        "expert/dropped_too_long": 1,
    }


def test_EI_17_tokens_that_no_engine_has_sampled_have_no_log_probs(
    tmp_path: Path, task: Task, encoder: ChatEncoder
) -> None:
    data = load(tmp_path, task, encoder, [{"row_id": task.prompts("train")[0].row_id, "response": "35"}])
    ((response,),) = data.responses.values()
    turn = response.turn((4, 5, 6))
    assert turn.prompt_ids == (4, 5, 6) and len(turn.response_ids) == len(turn.log_probs) == 3
    assert all(map(math.isnan, turn.log_probs))
    assert turn.finish_reason == "stop"


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (["text"], r"row 1='text': has to be a JSON object"),
        ([{"row_id": 0}], r'row 1=.*has to have a text "response"'),
        ([{"row_id": 0, "response": " "}], r'has to have a text "response"'),
        ([{"response": "3"}], r'has to have a "row_id" or a text "prompt"'),
        ([{"row_id": 0, "response": "3\ud83d"}], r'has to have a text "response", neither blank nor with half'),
        ([{"row_id": None, "prompt": None, "response": "3"}], r'has to have a "row_id" or a text "prompt"'),
        ([{"row_id": "0", "response": "3"}], r'"row_id" has to be a whole number'),
        ([{"row_id": True, "response": "3"}], r'"row_id" has to be a whole number'),
        ([{"row_id": 0.0, "response": "3"}], r'"row_id" has to be a whole number'),
        ([{"row_id": 0, "response": "3", "source": "policy"}], r'"source" has to be .* other than'),
        ([{"row_id": 0, "response": "3", "source": " Policy"}], r'"source" has to be .* other than'),
        ([{"row_id": 0, "response": "3", "source": "\udc00"}], r'"source" has to be .* other than'),
        ([{"row_id": 0, "response": "3", "source": 7}], r'"source" has to be .* other than'),
        ([{"row_id": 0, "response": "3<eos>4"}], r"row 1=.*must not contain <eos>"),
        ([{"row_id": 0, "response": "3<eos>"}], r"row 1=.*must not contain <eos>"),
        ([{"row_id": 0, "response": "3"}, {"row_id": 1, "response": "<bos>3"}], r"row 2=.*must not contain <bos>"),
        ([{"row_id": 99, "response": "3"}], r"env\.expert_data=.*no row can be used.*1 to no training prompt"),
        ([], r"env\.expert_data=.*no row can be used"),
    ],
)
def test_unusable_files_are_explained(
    tmp_path: Path, task: Task, encoder: ChatEncoder, rows: list[Any], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        load(tmp_path, task, encoder, rows)


@pytest.mark.parametrize(("name", "content"), [("x.jsonl", b"\xff\xfe"), ("x.parquet", b"PAR"), ("x.jsonl", None)])
def test_a_file_that_cannot_be_read(
    tmp_path: Path, task: Task, encoder: ChatEncoder, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"env\.expert_data=.*has to be a readable"):
        load_expert_data(tmp_path / name, task, encoder, max_tokens=8)


def test_at_most_20_unusable_rows_are_named(tmp_path: Path, task: Task, encoder: ChatEncoder) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, task, encoder, [{"row_id": 0}] * 30)
    assert [problem.key for problem in caught.value.problems] == [
        f"{tmp_path / 'experts.jsonl'} row {number}" for number in range(1, 21)
    ]


def test_a_row_that_names_a_held_out_prompt_in_any_way_is_never_used(
    tmp_path: Path, task: Task, encoder: ChatEncoder
) -> None:
    train, test = task.prompts("train")[0], task.prompts("test")[0]
    data = load(
        tmp_path,
        task,
        encoder,
        [
            {"row_id": train.row_id, "prompt": test.question, "response": "3"},
            {"row_id": test.row_id, "prompt": train.question, "response": "3"},
            {"row_id": 10, "prompt": f"  say:  {test.question.upper()}", "response": "3"},
            {"row_id": train.row_id, "response": "4"},
        ],
    )
    assert (data.num_held_out, data.num_unmatched) == (3, 0)
    assert {row_id: len(responses) for row_id, responses in data.responses.items()} == {train.row_id: 1}


def test_a_row_id_whose_prompt_is_another_one_is_no_match(tmp_path: Path, task: Task, encoder: ChatEncoder) -> None:
    first, second = task.prompts("train")[:2]
    data = load(
        tmp_path,
        task,
        encoder,
        [
            {"row_id": first.row_id, "prompt": second.question, "response": "3"},
            {"row_id": first.row_id, "prompt": first.question, "response": "4"},
        ],
    )
    assert data.num_unmatched == 1
    assert {row_id: len(responses) for row_id, responses in data.responses.items()} == {first.row_id: 1}


def test_an_answer_to_a_question_that_several_rows_ask_is_one_to_each(tmp_path: Path, encoder: ChatEncoder) -> None:
    folder = write_copy_task(tmp_path / "data", rows=4)
    train = (folder / "train.jsonl").read_text().splitlines()
    question = json.loads(train[0])["question"]
    twice = {"question": question, "answer": "#### 9"}  # Another answer to the first row's question.
    (folder / "train.jsonl").write_text("\n".join([*train, json.dumps(twice)]))
    task = make_task("gsm8k", data_path=str(folder), prompt_template="{question}")
    data = load(tmp_path, task, encoder, [{"prompt": question, "response": "9"}, {"row_id": 4, "response": "8"}])
    assert {row_id: len(responses) for row_id, responses in data.responses.items()} == {0: 1, 4: 2}


def test_a_parquet_file_has_all_columns_in_each_row(tmp_path: Path, task: Task, encoder: ChatEncoder) -> None:
    first, second = task.prompts("train")[:2]
    columns = {
        "row_id": [None, second.row_id],
        "prompt": [first.question, None],
        "response": ["3", "5"],
        "source": [None, "anna"],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "experts.parquet")
    data = load_expert_data(tmp_path / "experts.parquet", task, encoder, max_tokens=8)
    assert {row_id: response.source for row_id, (response,) in data.responses.items()} == {
        first.row_id: "expert",
        second.row_id: "anna",
    }
