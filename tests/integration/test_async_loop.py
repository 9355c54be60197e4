"""The asynchronous loop on the tiny model and the copy task, with the in-process engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from expert_iteration.collector import Collection
from expert_iteration.components import Components
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import ComponentError
from expert_iteration.loops import async_
from expert_iteration.runtime import local
from tests.integration.conftest import FinishedRun

AS_SYNC = [
    "train.dialog_turns_per_batch=128",
    "train.buffer_size=null",
    "train.empty_replay_buffer=true",
    "train.prioritized_sampling=false",
    "train.weight_update_frequency=null",
    "train.max_policy_age=0",
]
"""The asynchronous loop with nothing that sets it apart."""


@pytest.fixture
def build(make_config: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., Components]:
    numbers = count()

    def build(*more: str) -> Components:
        folder = tmp_path / f"async{next(numbers)}"
        folder.mkdir()
        return local.build(make_config("mode=async", "train.dialog_turns_per_batch=16", *more), folder)

    return build


@pytest.fixture
def run_async(build: Callable[..., Components]) -> Callable[..., FinishedRun]:
    def run_async(*more: str) -> FinishedRun:
        parts = build(*more)
        return FinishedRun(parts.run_dir, parts, async_.run(parts))

    return run_async


def test_at_age_zero_it_does_what_the_synchronous_loop_does(
    run: Callable[..., FinishedRun], run_async: Callable[..., FinishedRun]
) -> None:
    more = ["train.epochs=2", "train.optim_batch_size=8", "train.total_dialog_turns=384"]
    sync, other = run(*more), run_async(*AS_SYNC, *more)
    assert torch.equal(sync.weights(), other.weights())
    for kind, name in [("step", "loss/total"), ("step", "optim/learning_rate"), ("collection", "reward/mean")]:
        assert sync.series(kind, name) == other.series(kind, name) != []
    assert set(other.series("step", "policy/age_max")) == {0}
    assert sync.result.after is not None and other.result.after is not None
    assert sync.result.after.metrics() == other.result.after.metrics()


def test_steps_draw_from_the_buffer_and_weights_go_out_every_few_of_them(run_async: Callable[..., FinishedRun]) -> None:
    """32 collections of 16 completions, of which at most 4 are kept; a step takes 8 samples."""
    finished = run_async(
        "train.total_dialog_turns=512",
        "train.optim_batch_size=4",
        "train.gradient_accumulation_steps=2",
        "train.weight_update_frequency=2",
        "train.max_policy_age=3",
    )
    kept = finished.series("collection", "selection/accepted_samples")
    assert len(kept) == 32
    steps = finished.series("step", "policy/version")
    assert len(steps) == sum(kept) // 8 > 4
    # Counted before the step's own publish.
    assert steps == [number // 2 for number in range(len(steps))]
    ages = finished.series("step", "policy/age_max")
    assert max(ages) <= 3
    assert max(ages) > 0
    progress = finished.series("step", "progress/run")
    assert progress == sorted(progress)
    assert progress[-1] <= 1
    assert finished.parts.trainer.policy_version == -(-len(steps) // 2)
    # The engine ends with the last weights.
    assert finished.parts.engine.policy_version == finished.parts.trainer.policy_version


def test_it_learns(run_async: Callable[..., FinishedRun]) -> None:
    finished = run_async("train.total_dialog_turns=2048", "train.epochs=4", "optimizer.lr=3e-3")
    before, after = finished.result.before, finished.result.after
    assert before is not None and after is not None
    assert after.metrics()["eval/accuracy"] > before.metrics()["eval/accuracy"] + 0.3


def test_samples_that_are_too_old_when_their_turn_comes_are_dropped_and_counted(
    build: Callable[..., Components], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build(*AS_SYNC)
    made = count()
    sample = parts.collector.sample

    def older() -> Collection:
        collection = sample()
        if next(made) == 1:
            parts.weight_sync.publish()  # the weights move on while it waits
        return collection

    monkeypatch.setattr(parts.collector, "sample", older)
    finished = FinishedRun(parts.run_dir, parts, async_.run(parts))
    dropped = finished.series("collection", "buffer/evicted_samples")
    assert dropped[0] == 0
    assert dropped[1] == finished.series("collection", "selection/accepted_samples")[1] > 0


def test_collections_that_are_too_old_can_be_made_again_once(
    build: Callable[..., Components], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build(*AS_SYNC, "train.stale_samples=reissue")
    rows: list[list[int]] = []
    sample = parts.collector.sample

    def older() -> Collection:
        collection = sample()
        rows.append([visit.prompt.row_id for visit in collection.visits])
        if len(rows) in (2, 3):
            parts.weight_sync.publish()
        return collection

    monkeypatch.setattr(parts.collector, "sample", older)
    finished = FinishedRun(parts.run_dir, parts, async_.run(parts))
    assert len(rows) == 3
    assert rows[1] == rows[2] != rows[0]
    assert finished.series("collection", "async/reissued_turns") == [0, 128]
    assert finished.series("collection", "progress/dialog_turns") == [128, 256]
    assert finished.series("collection", "buffer/evicted_samples")[-1] > 0  # too old the second time as well


def test_EI_40_a_collection_that_fails_ends_the_run_with_its_own_error(
    build: Callable[..., Components], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build("train.total_dialog_turns=512", "train.optim_batch_size=4")
    calls, generate = count(), parts.engine.generate

    def failing(*arguments: object) -> object:
        if next(calls) == 6:
            raise OSError("the disk of the engine is gone")
        return generate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(parts.engine, "generate", failing)
    with pytest.raises(OSError, match="disk of the engine") as raised:
        async_.run(parts)
    assert any(entry.name == "failing" for entry in raised.traceback)


def test_EI_40_an_engine_that_hangs_is_told_within_the_limit(
    build: Callable[..., Components], monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import Event

    parts = build("eval.at_start=false", "train.max_wait_s=1")
    release = Event()
    monkeypatch.setattr(parts.engine, "generate", lambda *arguments: release.wait(60))
    with pytest.raises(ComponentError, match=r"train\.max_wait_s=1 s"):
        async_.run(parts)
    release.set()
