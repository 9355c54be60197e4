"""Async rewards against a real HTTP server on this machine: how many at once, retries, time limit, order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expert_iteration.tasks import make_task, make_verifier
from expert_iteration.types import Score, Verifier
from tests.reward_service import RewardService

TIMED_OUT = Score(None, {"success": 0.0, "timed_out": 1.0})


@contextmanager
def asked(
    folder: Path, service: RewardService, *, workers: int = 1, limit: float = 30.0, **options: Any
) -> Iterator[Any]:
    """A function that scores texts by the service, through the verifier that a run would use."""
    rows = [{"prompt": f"prompt {number}", "url": service.url} for number in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options |= {"reward": "tests.reward_service:ask"}
    task = make_task("custom", data_path=str(folder / "rows.jsonl"), reward="graded", options=options)
    prompt = task.prompts("train")[0]
    verifier: Verifier = make_verifier(task, workers=workers, time_limit_s=limit)
    try:
        yield lambda texts: verifier.score_many([(prompt, text) for text in texts])
    finally:
        verifier.close()


@pytest.mark.parametrize(("workers", "concurrency", "at_once"), [(1, 4, 4), (2, 5, 4), (3, 1, 1)])
def test_a_service_sees_as_many_requests_at_once_as_the_limit_allows(
    tmp_path: Path, workers: int, concurrency: int, at_once: int
) -> None:
    texts = ["x" * (number % 10) + "y" for number in range(24)]
    with RewardService(expected_at_once=at_once) as service:
        with asked(tmp_path, service, workers=workers, concurrency=concurrency) as ask:
            scores = ask(texts)
        assert service.most_in_flight == at_once <= concurrency
        assert service.num_connections <= concurrency  # each worker keeps its client
    assert [score.reward for score in scores] == [len(text) / 10 for text in texts]


def test_errors_and_lost_connections_are_asked_again_as_often_as_allowed(tmp_path: Path) -> None:
    texts = ["fail 2 a", "good", "drop 2 bb", "fail 3 c", "drop 3 d", "drop 1 eee", "last one"]
    with RewardService(expected_at_once=len(texts)) as service:
        with asked(tmp_path, service, concurrency=16, attempts=3) as ask:
            scores = ask(texts)
        assert service.requests == dict(zip(texts, (3, 1, 3, 3, 3, 2, 1), strict=True))
    assert [score.reward for score in scores] == [0.8, 0.4, 0.9, None, None, 1.0, 0.8]
    assert scores[3] == scores[4] == Score(None, {"success": 0.0, "ask.raised": 1.0})


def test_what_a_service_never_answers_is_unscored_and_the_rest_is_not(tmp_path: Path) -> None:
    with RewardService(expected_at_once=4) as service, asked(tmp_path, service, limit=3.0, concurrency=4) as ask:
        scores = ask(["a", "hang", "bb", "ccc", "dddd"])
        assert [score.reward for score in scores] == [0.1, None, 0.2, 0.3, 0.4]
        assert scores[1] == TIMED_OUT
        assert [score.reward for score in ask(["a"])] == [0.1]


def test_a_service_that_is_not_there_leaves_all_unscored_and_nothing_lost(tmp_path: Path) -> None:
    with RewardService(expected_at_once=1) as service:
        pass
    with asked(tmp_path, service, concurrency=8, attempts=2) as ask:
        scores = ask(["a", "bb", "ccc"])
    assert scores == [Score(None, {"success": 0.0, "ask.raised": 1.0})] * 3


def test_a_function_keeps_its_client_in_process_too(tmp_path: Path) -> None:
    with RewardService(expected_at_once=1) as service:
        with asked(tmp_path, service, workers=0, attempts=1) as ask:
            scores = ask(["a", "bb", "ccc"])
        assert [score.reward for score in scores] == [0.1, 0.2, 0.3]
        assert service.num_connections == 1
