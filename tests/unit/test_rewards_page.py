"""The examples of docs/rewards.md, copied from the page and run as a new user would."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from expert_iteration.tasks import make_task, make_verifier
from tests.reward_service import RewardService

ROOT = Path(__file__).parents[2]


def block(page: str, language: str, number: int = 0) -> str:
    """A block of that language in the section on custom tasks, counted from 0."""
    section = page[page.index("\n## custom\n") :]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language][number]


def test_the_example_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(block(page, "python"))
    first, second = (json.loads(line) for line in block(page, "jsonl").splitlines())
    words = [f"word{number}" for number in range(40)]
    rows = [first, second, *({"prompt": f"Say {word} backwards.", "answer": word[::-1]} for word in words)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses = [{"row_id": 0, "response": text} for text in ("tac", "cat", "horse")]
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in responses))
    monkeypatch.chdir(tmp_path)
    command, _ = block(page, "").replace("\\\n", " ").splitlines()
    python, script, *arguments = shlex.split(command)
    assert (python, script) == ("python", "scripts/score.py")
    spec = importlib.util.spec_from_file_location("score_script", ROOT / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main([*arguments, "--out", "scores.jsonl"]) == 0
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [score["reward"] for score in scores] == [1.0, 0.5, 0.0]


def test_the_example_of_a_service_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block((ROOT / "docs" / "rewards.md").read_text(encoding="utf-8"), "python", 1)
    rows = [{"prompt": f"prompt {number}", "answer": "a"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    with RewardService(expected_at_once=3) as service:
        address = "http://127.0.0.1:8000"
        assert address in code
        (tmp_path / "rewards_of_a_service.py").write_text(code.replace(address, service.url.removesuffix("/score")))
        options = {"reward": "rewards_of_a_service:reward"}
        task = make_task("custom", data_path="rows.jsonl", reward="graded", options=options)
        verifier = make_verifier(task, workers=1, time_limit_s=20.0)
        try:
            scores = verifier.score_many([(task.prompts("train")[0], text) for text in ("a", "fail 1 b", "ccc")])
        finally:
            verifier.close()
        assert service.most_in_flight == 3
    assert [score.reward for score in scores] == [0.1, 0.8, 0.3]
