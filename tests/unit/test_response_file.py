"""scripts/score.py: rows matched with prompts, the table, the written scores, the exit statuses."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = "tests.reward_examples"


@pytest.fixture
def main() -> Callable[[Sequence[str]], int]:
    spec = importlib.util.spec_from_file_location("score_script", ROOT / "scripts" / "score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Sequence[str]], int] = module.main
    return function


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm8k(tmp_path: Path) -> list[str]:
    for split, start in (("train", 0), ("test", 2)):
        rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in (start, start + 1)]
        write(tmp_path / f"{split}.jsonl", rows)
    return ["env.dataset=gsm8k", f"env.data_path={tmp_path}", "env.reward=graded"]


def test_rows_of_every_kind_are_scored(
    main: Callable[..., int], gsm8k: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    responses = write(
        tmp_path / "responses.jsonl",
        [
            {"row_id": 3, "response": "#### 4"},
            {"prompt": "what is 0 + 1?", "response": "It is 1"},
            {"row_id": 0, "rollouts": [{"text": "#### 1"}, {"text": "none"}]},
        ],
    )
    out = tmp_path / "scores.jsonl"
    assert main([responses, *gsm8k, "--out", str(out), "--self-check"]) == 0
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["line"], row["row_id"], row["reward"]) for row in scores] == [
        (1, 3, 1.0), (2, 0, pytest.approx(0.9)), (3, 0, 1.0), (3, 0, 0.0),
    ]  # fmt: skip
    assert scores[1]["details"] == {"success": 1.0, "format": 0.0, "closeness": 1.0, "length": 1.0}
    shown = capsys.readouterr().out
    assert "closeness" in shown and "0.725" in shown and "4 scored, 0 unscored" in shown


def test_unscored_responses_show_in_the_exit_status(
    main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "rows.jsonl", [{"prompt": f"row {n}"} for n in range(40)])
    responses = write(
        tmp_path / "responses.jsonl", [{"row_id": 0, "response": text} for text in ("int", "nan", "none")]
    )
    keys = ["env.dataset=custom", f"env.data_path={data}", f"env.options={{reward: {HERE}:returns}}"]
    out = tmp_path / "scores.jsonl"
    assert main([responses, *keys, "env.verifier_workers=0", "--out", str(out)]) == 1
    assert "1 scored, 2 unscored" in capsys.readouterr().out
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert [score["reward"] for score in scores] == [2.0, None, None]
    assert [sorted(score["details"])[0] for score in scores] == ["returns", "returns.invalid", "returns.declined"]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "at least one row"),
        ([{"row_id": 0}], "row 1={'row_id': 0}: has to have a text"),
        ([{"row_id": 0, "response": "1"}, {"row_id": 9, "response": "1"}], "row 2=.*one of the 4 of the task"),
        ([{"prompt": "What is", "response": "1"}], "row 1=.*one of the 4 of the task"),
        ([{"row_id": 0, "prompt": "What is 1 + 1?", "response": "2"}], "row 1=.*both they have to agree"),
        (["text"], "row 1='text'"),
    ],
)
def test_wrong_input_ends_with_status_2_and_names_the_row(
    main: Callable[..., int], gsm8k: list[str], capfd: pytest.CaptureFixture[str], rows: Any, match: str
) -> None:
    folder = Path(gsm8k[1].partition("=")[2])
    assert main([write(folder / "responses.jsonl", rows), *gsm8k]) == 2
    error = capfd.readouterr().err
    assert re.search(match, error), error


def test_wrong_keys_and_files_end_with_status_2(
    main: Callable[..., int], gsm8k: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent.jsonl"), *gsm8k]) == 2
    assert main([write(tmp_path / "r.jsonl", [{"row_id": 0, "response": "1"}]), *gsm8k, "env.rewrad=exact"]) == 2
    error = capsys.readouterr().err
    assert "no such file" in error and "env.rewrad" in error
