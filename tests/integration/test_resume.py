"""A run goes on bit for bit from any of its checkpoints. Run: pytest tests/integration/test_resume.py"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.torture import MEASURED, comparable_metrics
from expert_iteration import resume
from expert_iteration.checkpoint import load_state
from expert_iteration.checkpoint_files import complete
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import UserError
from expert_iteration.loops import async_, sync
from expert_iteration.loops.base import run_loop
from expert_iteration.run_folder import FINISHED_FILE
from expert_iteration.runtime import local
from tests.integration.conftest import FinishedRun

EVERY_STEP = (
    "train.total_dialog_turns=384",
    "train.epochs=2",
    "train.checkpoint_frequency=1",
    "train.keep_checkpoints=null",
)


@pytest.fixture
def go_on(make_config: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., FinishedRun]:
    """Copies a run as if it had been killed some time after a checkpoint was taken, and lets it go on from that."""

    def go_on(finished: FinishedRun, step: int, *overrides: str) -> FinishedRun:
        folder = tmp_path / f"resumed{step}"
        shutil.copytree(finished.folder, folder)
        (folder / FINISHED_FILE).unlink()
        for checkpoint in complete(folder / "checkpoints"):
            if int(checkpoint.name.rpartition("_")[2]) > step:
                shutil.rmtree(checkpoint)
        config = make_config(*overrides, f"resume={folder}")
        found = resume.find(config, [], print)
        assert found is not None
        assert found.checkpoint.name == f"checkpoint_{step:04d}"
        assert found.run_dir == folder
        parts = local.build(replace(config, resume=str(found.checkpoint)), folder)
        assert parts.trainer.optimizer_steps == step
        loop = async_.AsyncLoop(parts) if config.loop == "async" else sync.SyncLoop(parts)
        saved = load_state(found.checkpoint)["buffer"]
        if saved is not None:  # at the end of a run nothing is trained any more
            restored = parts.buffer.state_dict()
            for state in (saved, restored):
                del state["buffer"]["_rng"]  # torchrl's copy of the generator, of which ours takes the place
            assert_same(saved, restored, "buffer")
        return FinishedRun(folder, parts, run_loop(loop))

    return go_on


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """Same plain values, same bits."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.nan_to_num(9e9), other.nan_to_num(9e9)), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_same(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where


def assert_same_run(one: FinishedRun, other: FinishedRun) -> None:
    """Checkpoints, samples and metrics of both."""
    assert torch.equal(one.weights(), other.weights())
    folders = [{path.name: path for path in complete(run.folder / "checkpoints")} for run in (one, other)]
    assert folders[0].keys() == folders[1].keys()
    for name in folders[0]:
        first, second = (load_state(folder[name]) for folder in folders)
        for state in (first, second):
            del state["log"]["elapsed"], state["log"]["metrics_bytes"], state["published"]
        assert_same(first, second, name)
    samples = [(run.folder / "samples.jsonl").read_bytes() for run in (one, other)]
    assert samples[0] == samples[1]
    assert comparable_metrics(one.folder, is_a_matter_of_time) == comparable_metrics(other.folder, is_a_matter_of_time)


def is_a_matter_of_time(kind: str, name: str) -> bool:
    """How far training had come when a collection beside it was finished, too."""
    return name.startswith((*MEASURED, "async/")) or (kind, name) == ("collector", "progress/optimizer_step")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param((), id="full"),
        pytest.param(("train_model.lora.enabled=true", "train_model.lora.dropout=0.2"), id="lora"),
        pytest.param(("train.sync_iter=false",), id="overlapped"),
        pytest.param(("train.weight_update_frequency=3",), id="publishes in the middle"),
        pytest.param(
            ("train.prioritized_sampling=true", "train.buffer_size=64", "train.empty_replay_buffer=false"),
            id="prioritized",
        ),
        pytest.param(("train.gradient_accumulation_steps=3", "train.optim_batch_size=4"), id="accumulated"),
    ],
)
def test_a_run_goes_on_from_any_step_as_if_nothing_had_been(
    run: Callable[..., FinishedRun], go_on: Callable[..., FinishedRun], variant: tuple[str, ...]
) -> None:
    finished = run(*EVERY_STEP, *variant)
    steps = finished.parts.trainer.optimizer_steps
    assert steps >= 6
    assert len(complete(finished.folder / "checkpoints")) == steps
    # The last of a collection, the first and one in the middle of a pass are among them.
    for step in {1, 2, 3, steps // 2, steps - 1, steps}:
        resumed = go_on(finished, step, *EVERY_STEP, *variant)
        assert_same_run(finished, resumed)
        assert resumed.result.before == finished.result.before
        assert resumed.result.after == finished.result.after


def test_a_resumed_run_says_where_its_steps_before_came_from(
    run: Callable[..., FinishedRun], go_on: Callable[..., FinishedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    finished = run(*EVERY_STEP)
    resumed = go_on(finished, 3, *EVERY_STEP)
    assert "Resumed after step 3." in capsys.readouterr().out
    elapsed = resumed.series("step", "time/elapsed")
    assert elapsed == sorted(elapsed)
    numbers = resumed.series("step", "progress/optimizer_step")
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.topk_size=3", r"train\.topk_size=3: the run that is resumed has 4"),
        ("optimizer.lr=1e-3", r"optimizer\.lr=0\.001: the run that is resumed has 0\.01, and the checkpoint's moments"),
        ("seed=5", r"seed=5: the run that is resumed has 0"),
    ],
)
def test_another_config_is_told_key_by_key(
    run: Callable[..., FinishedRun], make_config: Callable[..., RunConfig], override: str, told: str
) -> None:
    finished = run(*EVERY_STEP)
    stored = json.loads((complete(finished.folder / "checkpoints")[0] / "metadata.json").read_text())["config"]
    assert resume.differences(stored, make_config(*EVERY_STEP, "logging.progress=live", "train.max_time=9")) == []
    [problem] = resume.differences(stored, make_config(*EVERY_STEP, override))
    with pytest.raises(UserError, match=told):
        raise UserError(problem)


def test_other_data_another_model_and_other_threads_are_refused(
    run: Callable[..., FinishedRun],
    go_on: Callable[..., FinishedRun],
    copy_task: Path,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    shutil.copytree(copy_task, data)
    shutil.copytree(tiny_model, model)
    own = [*EVERY_STEP, f"env.data_path={data}", f"model.name={model}"]
    finished = run(*own)
    with pytest.raises(UserError, match=r"num_threads|threads was 1 and is 2; .*|threads was 1 and is 2"):
        go_on(finished, 1, *own, "num_threads=2")
    resumed = go_on(finished, 2, *own, "num_threads=2", "resume_mismatch=accept")
    assert resumed.parts.trainer.optimizer_steps == finished.parts.trainer.optimizer_steps

    lines = (data / "train.jsonl").read_text()
    (data / "train.jsonl").write_text(lines.replace("#### 3", "#### 5", 1))
    with pytest.raises(UserError, match="not those that the run was started with"):
        go_on(finished, 3, *own)
    (data / "train.jsonl").write_text(lines)
    shutil.rmtree(model)
    from tests.tiny import save_tiny_model

    save_tiny_model(model, seed=1)
    with pytest.raises(UserError, match=r"model\.name=.*not those that the run was started with"):
        go_on(finished, 4, *own)


def test_a_damaged_checkpoint_is_passed_over(
    run: Callable[..., FinishedRun],
    go_on: Callable[..., FinishedRun],
    make_config: Callable[..., RunConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished = run(*EVERY_STEP)
    (finished.folder / FINISHED_FILE).unlink()
    newest, before, *_ = complete(finished.folder / "checkpoints")
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    config = make_config(*EVERY_STEP, "resume=auto")
    found = resume.find(config, [finished.folder], print)
    assert found == resume.Found(before, finished.folder)
    assert f"Passed over {newest}: state.pt is not what was written." in capsys.readouterr().out
    for checkpoint in complete(finished.folder / "checkpoints"):
        (checkpoint / "COMPLETE").unlink()
    assert resume.find(config, [finished.folder], print) is None
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        resume.find(make_config(*EVERY_STEP, f"resume={finished.folder}"), [], print)


def test_auto_takes_the_newest_unfinished_run_of_its_name(
    run: Callable[..., FinishedRun], make_config: Callable[..., RunConfig]
) -> None:
    old, new = run(*EVERY_STEP), run(*EVERY_STEP)
    run_dirs = [old.folder, new.folder]
    config = make_config(*EVERY_STEP, "resume=auto")
    assert resume.find(config, run_dirs, print) is None  # both have come to their end
    (new.folder / FINISHED_FILE).unlink()
    assert resume.find(config, run_dirs, print).run_dir == new.folder
    other = make_config(*EVERY_STEP, "resume=auto", "logging.experiment_name=other")
    assert resume.find(other, run_dirs, print) is None
    with pytest.raises(UserError, match="this run has come to its end"):
        resume.find(make_config(*EVERY_STEP, f"resume={old.folder}"), [], print)


def test_one_process_at_a_time_works_in_a_folder(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_iteration.run_folder.LOCK_LIMIT_S", 0.1)
    parts = local.build(make_config(), tmp_path / "run")
    with pytest.raises(UserError, match="another process works in this folder"):
        local.build(make_config(), tmp_path / "run")
    sync.run(parts)
    with pytest.raises(UserError, match="another run has written to this folder"):
        local.build(make_config(), tmp_path / "run")


def test_an_asynchronous_run_whose_samples_are_all_current_goes_on_bit_for_bit(
    make_config: Callable[..., RunConfig], go_on: Callable[..., FinishedRun], tmp_path: Path
) -> None:
    own = [
        *EVERY_STEP,
        "mode=async",
        "train.max_policy_age=0",
        "train.prioritized_sampling=true",
        "train.buffer_size=64",
    ]
    folder = tmp_path / "run"
    parts = local.build(make_config(*own), folder)
    finished = FinishedRun(folder, parts, async_.run(parts))
    steps = parts.trainer.optimizer_steps
    for step in {1, steps // 2, steps - 1}:
        assert_same_run(finished, go_on(finished, step, *own))


@pytest.mark.parametrize("more", [(), ("train.weight_update_frequency=2", "train.max_policy_age=2")])
def test_EI_37_an_asynchronous_run_skips_no_prompt_and_doubles_none(
    make_config: Callable[..., RunConfig], go_on: Callable[..., FinishedRun], tmp_path: Path, more: tuple[str, ...]
) -> None:
    own = [*EVERY_STEP, "mode=async", "train.dialog_turns_per_batch=16", *more]
    folder = tmp_path / "run"
    parts = local.build(make_config(*own), folder)
    finished = FinishedRun(folder, parts, async_.run(parts))
    steps = parts.trainer.optimizer_steps
    for step in {1, steps // 2, steps}:
        resumed = go_on(finished, step, *own)
        groups = [json.loads(line) for line in (resumed.folder / "samples.jsonl").read_text().splitlines()]
        visits = Counter((group["row_id"], group["epoch"]) for group in groups)
        assert len(visits) == 24  # 384 / 16, each once
        assert set(visits.values()) == {1}
        expected = {(group["row_id"], group["epoch"]) for group in map(json.loads, (folder / "samples.jsonl").open())}
        assert visits.keys() == expected
        collectors = resumed.series("collector", "progress/collection")
        assert sorted(collectors) == list(range(24))
