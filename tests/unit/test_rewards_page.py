"""The example of docs/rewards.md, copied from the page and run as a new user would."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def block(page: str, language: str) -> str:
    """The first block of that language in the section on custom tasks."""
    section = page[page.index("\n## custom\n") :]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return next(text for name, text in blocks if name == language)


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
