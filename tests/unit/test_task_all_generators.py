"""Every generator of reasoning_gym: its rows, its gold answers, and what its scorer makes of hostile responses.

A tenth of them in each run; all with `pytest -m slow tests/unit/test_task_all_generators.py`.
"""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from expert_iteration.errors import UserError
from expert_iteration.tasks import make_verifier
from expert_iteration.tasks.answers import answers_match, extract_answer
from expert_iteration.tasks.generator_options import HASH_DEPENDENT
from expert_iteration.tasks.reasoning_gym import NUMBER_GENERATORS, ReasoningGym

QUICK = (
    "boxnet",
    "calendar_arithmetic",
    "composite",
    "countdown",
    "gcd",
    "number_sorting",
    "propositional_logic",
    "puzzle24",
    "rush_hour",
    "simple_integration",
    "string_manipulation",
    "word_ladder",
)
PARTS = [{"name": "gcd", "weight": 1, "config": {}}, {"name": "string_insertion", "weight": 1, "config": {}}]
REQUIRED: dict[str, dict[str, Any]] = {"composite": {"datasets": PARTS}}
GENERATORS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in sorted(DATASETS)]
WITHOUT_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}

HOSTILE = [
    "9**9**9**9",
    "1e999999999",
    "-1e-999999999",
    "9" * 1_000_000,
    "[" + "9" * 1_000_000 + "]",
    "(" * 100_000 + "1" + ")" * 100_000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    "\x00",
    "\ud800",
    "nan",
    "[NaN, NaN]",
    "Infinity",
    "1," * 90_000,
    "×".join("9" * 50_000),
    "∧".join("P" * 500),
    "¬" * 900 + "P",
    "ABC" * 30_000,
    "R999999999 A+999999999",
    "A+99999 " * 10_000,
    "R " * 9000,
    '[{"Agent[0.5, 0.5]": "move(' + ", " * 4900 + '"}]',
    '{"a": "' + "x" * 3900 + '"}',
    "x*exp(exp(exp(exp(9))))",
    "(x + y)**20**20",
    "__import__('os').abort() #" + "x" * 3000,
    "1+" * 40_000 + "1",
    "<answer>" * 10_000,
    "Answer:" * 10_000,
    " " * 1_000_000,
]


@pytest.fixture(autouse=True)
def _a_fixed_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def task(request: pytest.FixtureRequest) -> Iterator[ReasoningGym]:
    name = request.param
    yield ReasoningGym(options={"generator": name} | REQUIRED.get(name, {}), reward="graded", train_size=4, test_size=2)


@pytest.mark.parametrize("task", GENERATORS, indirect=True)
def test_rows_gold_answers_and_hostile_responses(task: ReasoningGym) -> None:
    rows = [*task.prompts("train"), *task.prompts("test")]
    assert len({prompt.messages[-1]["content"] for prompt in rows}) == 6
    task.self_check()
    (source,) = task._sources
    _check_gold_answers(source.generator, task)
    _check_hostile_responses(task)


def _check_gold_answers(generator: str, task: ReasoningGym) -> None:
    copy = pickle.loads(pickle.dumps(task))
    for prompt in task.prompts("train"):
        empty = task.score(prompt, "")
        assert empty.details["success"] == 0.0 and (empty.reward or 0.0) < 1.0
        assert (prompt.gold is None) == (generator in WITHOUT_GOLD)
        if prompt.gold is None:
            continue
        right = task.score(prompt, f"Well.\n<answer>{prompt.gold}</answer>")
        assert right.reward == right.details["success"] == 1.0
        assert copy.score(prompt, f"Answer: {prompt.gold}") == right
        without_numbers = re.sub(r"\d+(\.\d+)?", "nan", prompt.gold)
        if without_numbers != prompt.gold:
            assert task.score(prompt, without_numbers).details["success"] == 0.0
        if generator in NUMBER_GENERATORS and re.fullmatch(r"-?[0-9]+", prompt.gold):
            assert task.score(prompt, f"So the answer is {prompt.gold}.").reward == 1.0


def _check_hostile_responses(task: ReasoningGym) -> None:
    """Each is scored, in a process that could be ended if it hung: none takes too long or crashes, and none is right
    unless its last number happens to be the gold answer."""
    verifier = make_verifier(task, workers=1, time_limit_s=60.0)
    try:
        prompt = task.prompts("train")[0]
        scores = verifier.score_many([(prompt, response) for response in HOSTILE])
    finally:
        verifier.close()
    for response, score in zip(HOSTILE, scores, strict=True):
        assert not score.details.keys() & {"timed_out", "crashed"}, response[:40]
        is_gold = prompt.gold is not None and answers_match(extract_answer(response) or "", prompt.gold)
        assert score.details["success"] == 0.0 or is_gold, response[:40]


@pytest.mark.parametrize("name", HASH_DEPENDENT)
def test_what_is_refused_stands_in_the_table(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    for options in ({"generator": name}, {"generator": "composite", "datasets": [{**PARTS[0], "name": name}]}):
        with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
            ReasoningGym(options=options, train_size=1, test_size=1)
    page = Path(__file__).parents[2] / "docs" / "rewards.md"
    assert re.search(rf"^\| .*`{name}`.* \|$", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", ["codeio", "list_functions"])
def test_rows_do_not_follow_from_the_global_generators(name: str) -> None:
    rows = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        task = ReasoningGym(options={"generator": name}, train_size=60, test_size=10)
        rows.append([(prompt.messages, prompt.gold) for split in ("train", "test") for prompt in task.prompts(split)])
        expected = random.Random(seed).random(), np.random.RandomState(seed).random()
        assert (random.random(), np.random.random()) == expected
    assert rows[0] == rows[1]


def test_composite_needs_its_parts() -> None:
    with pytest.raises(UserError, match=r"env\.options"):
        ReasoningGym(options={"generator": "composite"}, train_size=1, test_size=1)


def test_the_list_of_quick_generators_names_generators() -> None:
    assert set(QUICK) <= set(DATASETS) and len(DATASETS) == 106
