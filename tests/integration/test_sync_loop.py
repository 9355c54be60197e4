"""The whole pipeline on a tiny model. Run: pytest tests/integration/test_sync_loop.py"""

from __future__ import annotations

import json
import math
import os
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from expert_iteration import checkpoint
from expert_iteration.errors import ComponentError, UserError, WeightSyncError
from expert_iteration.loops import sync
from expert_iteration.runtime import local

LEARNING = ("train.dialog_turns_per_batch=256", "train.total_dialog_turns=2560", "train.epochs=2")
"""Enough for the tiny model to learn the task, on top of the settings of conftest.py."""


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tiny_model_learns_to_copy(run):
    finished = run(*LEARNING)
    rewards = finished.series("collection", "reward/mean")
    assert rewards[0] < 0.35
    assert rewards[-1] > 0.7
    before, after = finished.result.before, finished.result.after
    assert after.interval[0] > before.interval[1]
    # Training rewards and held-out accuracy speak of the same thing.
    assert finished.series("collection", "reward/accuracy") == rewards


def test_what_a_run_leaves(run):
    finished = run()
    folder = finished.folder
    assert {"metrics.jsonl", "samples.jsonl", "reward.png", "accuracy.png"} <= {path.name for path in folder.iterdir()}
    groups = read_lines(folder / "samples.jsonl")
    assert len(groups) == 16
    assert all(len(group["rollouts"]) == 16 for group in groups)
    selected = [rollout for group in groups for rollout in group["rollouts"] if rollout["selected"]]
    assert sum(finished.series("collection", "selection/accepted_samples")) == len(selected) > 0
    assert {rollout["reward"] for rollout in selected} == {1.0}
    assert len(read_lines(folder / "eval" / "before.jsonl")) == 60

    saved = checkpoint.latest(folder / "checkpoints")
    model = AutoModelForCausalLM.from_pretrained(saved)
    state = dict(finished.parts.trainer.policy.merged_state())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_no_held_out_question_is_trained_on(run):
    finished = run()
    trained = {group["messages"][-1]["content"] for group in read_lines(finished.folder / "samples.jsonl")}
    held_out = {problem.messages[-1]["content"] for problem in finished.result.after.problems}
    assert len(held_out) == 60
    assert not trained & held_out


def test_same_seed_same_weights(run):
    first, second, other = run("seed=3"), run("seed=3"), run("seed=4")
    assert torch.equal(first.weights(), second.weights())
    assert not torch.equal(first.weights(), other.weights())
    timing = ("time/", "perf/", "memory/")
    for one, two in zip(first.records("step"), second.records("step"), strict=True):
        assert {k: v for k, v in one.values.items() if not k.startswith(timing)} == {
            k: v for k, v in two.values.items() if not k.startswith(timing)
        }
    assert (first.folder / "samples.jsonl").read_bytes() == (second.folder / "samples.jsonl").read_bytes()


def test_dropout_of_an_adapter_is_seeded(run):
    settings = ("train_model.lora.enabled=true", "train_model.lora.dropout=0.3", "optimizer.lr=1e-3")
    first, second = run(*settings), run(*settings)
    assert torch.equal(first.weights(), second.weights())


def test_kl_starts_at_zero_and_every_number_is_finite(run):
    for settings in ((), ("train_model.lora.enabled=true",), ("train.loss_function=minor_sft",)):
        finished = run(*settings)
        kl = finished.series("step", "loss/kl_to_ref")
        assert kl[0] == pytest.approx(0.0, abs=1e-9)
        assert max(kl) > 0
        # Trainer and engine hold the same weights until the first step.
        assert finished.series("step", "policy/engine_log_prob_difference")[0] == pytest.approx(0.0, abs=1e-5)
        for record in finished.records("step") + finished.records("collection"):
            assert all(math.isfinite(value) for value in record.values.values())


def test_EI_16_trainer_and_engine_agree_whatever_the_sampling(run):
    finished = run(
        "inference_model.temperature=0.6", "inference_model.top_p=0.8", "inference_model.top_k=9",
        "inference_model.min_p=0.01", "selection.above=none",
    )  # fmt: skip
    differences = finished.series("step", "policy/engine_log_prob_difference")
    assert len(differences) == 2
    assert max(differences) < 1e-5


def test_a_run_in_bfloat16(run):
    finished = run(
        "train.mixed_precision=true", "inference_model.torch_dtype=bfloat16", "ref_model.torch_dtype=bfloat16"
    )  # fmt: skip
    assert finished.weights().dtype == torch.float32
    # The same numbers as in float32 to the 8 bits of bfloat16.
    assert finished.series("step", "loss/kl_to_ref")[0] == pytest.approx(0.0, abs=1e-3)
    assert max(finished.series("step", "policy/engine_log_prob_difference")) < 0.05


def test_schedules_end_with_the_run_and_steps_count_what_was_kept(run):
    finished = run("train.total_dialog_turns=512", "optimizer.scheduler.warmup_steps=0", "train.optim_batch_size=4")
    kept = finished.series("collection", "selection/accepted_samples")
    steps = [len([r for r in finished.records("step") if r.values["progress/collection"] == c]) for c in range(4)]
    assert steps == [math.ceil(count / 4) for count in kept]
    assert finished.parts.trainer.total_steps == 4 * 8
    assert sum(steps) < 32, "some group of this run was dropped, or the test shows nothing"
    progress = finished.series("step", "progress/run")
    assert progress[-1] == pytest.approx(1.0)
    for collection in range(1, 4):
        # The first step of a collection stands at its planned place, however few steps came before it.
        first = sum(steps[:collection])
        expected = 0.5e-2 * (1 + math.cos(math.pi * collection / 4))
        assert finished.series("step", "optim/learning_rate")[first] == pytest.approx(expected)


def test_a_full_run_takes_exactly_the_steps_of_its_schedule(run):
    # Every completion of every group is kept: above=none, k = N
    finished = run("selection.above=none", "train.topk_size=16", "train.epochs=2")
    assert len(finished.records("step")) == finished.parts.trainer.total_steps == 2 * 2 * 8


def test_gradient_accumulation_and_devices_widen_the_optimizer_batch(run):
    settings = ("selection.above=none", "train.topk_size=16", "train.total_dialog_turns=128")
    accumulated = run(*settings, "train.gradient_accumulation_steps=3")
    assert len(accumulated.records("step")) == 3  # 8 micro-batches: 3, 3 and the last 2
    two_devices = run(*settings, "train_model.num_devices=2")
    assert len(two_devices.records("step")) == 4
    equal = run(*settings, "train.gradient_accumulation_steps=2")
    assert torch.equal(two_devices.weights(), equal.weights())


def test_publishes_by_optimizer_steps(run):
    finished = run("train.weight_update_frequency=1", "train.optim_batch_size=4")
    steps = len(finished.records("step"))
    assert finished.parts.trainer.policy_version == finished.parts.engine.policy_version == steps
    # The samples of a collection age by one with every publish.
    first = [r.values["policy/age_max"] for r in finished.records("step") if r.values["progress/collection"] == 0]
    assert first == list(range(len(first)))
    assert all(0 < share <= 1 for share in finished.series("step", "train/weights_changed_share"))


def test_a_publish_interval_longer_than_a_collection_is_kept(run):
    finished = run("train.weight_update_frequency=1000", "train.total_dialog_turns=384")
    assert finished.parts.trainer.policy_version == 1  # the last weights, for the final evaluation
    assert {record.values["policy/version"] for record in finished.records("step")} == {0}


def test_weights_that_change_behind_the_loops_back_stop_the_run(make_config, tmp_path):
    parts = local.build(make_config(), tmp_path)
    parts.collector.sample()
    with torch.no_grad():
        next(parts.engine._model.parameters()).add_(1e-3)
    with pytest.raises(WeightSyncError, match="checksum"):
        parts.collector.sample()


def test_two_visits_to_a_prompt_have_other_seeds(make_config, tmp_path):
    collector = local.build(make_config("env.train_size=8"), tmp_path).collector
    first, second = collector.stream.take(8), collector.stream.take(8)
    assert [visit.epoch for visit in first + second] == [0] * 8 + [1] * 8
    seeds = [seed for visit in first + second for seed in collector._request(visit).seeds]
    assert len(set(seeds)) == 2 * 8 * 16


def test_overlapped_sampling_ends_before_the_publish(make_config, tmp_path, monkeypatch):
    parts = local.build(make_config("train.sync_iter=false", "train.total_dialog_turns=384"), tmp_path)
    events = []
    sample, publish = parts.collector.sample, parts.weight_sync.publish

    def slow_sample():
        events.append("sample")
        time.sleep(1.0)
        result = sample()
        events.append("sampled")
        return result

    monkeypatch.setattr(parts.collector, "sample", slow_sample)
    monkeypatch.setattr(parts.weight_sync, "publish", lambda: events.append("publish") or publish())
    sync.run(parts)
    assert events == [*["sample", "sampled"] * 2, "publish", "sample", "sampled", "publish", "publish"]


def test_a_run_that_trains_nothing_says_so(run, capsys):
    run("selection.min_reward=2.0", "train.max_empty_collections=9", "eval.at_start=false")
    assert "Nothing was trained: of 256 completions none was kept" in " ".join(capsys.readouterr().out.split())


def test_one_publish_after_each_collection_is_the_default(run):
    finished = run()
    assert finished.parts.trainer.policy_version == 2
    assert finished.series("step", "policy/age_max") == [0.0] * len(finished.records("step"))


def test_overlapped_collections_are_at_most_one_publish_stale(run):
    settings = ("train.sync_iter=false", "train.total_dialog_turns=512")
    finished, again = run(*settings), run(*settings)
    ages = {
        record.values["progress/collection"]: record.values["policy/age_max"] for record in finished.records("step")
    }
    assert ages == {0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0}
    assert torch.equal(finished.weights(), again.weights())


def test_a_kept_buffer_grows_and_old_samples_leave_it(run):
    settings = ("train.empty_replay_buffer=false", "train.buffer_size=200", "train.total_dialog_turns=512")
    kept = run(*settings)
    sizes = kept.series("collection", "buffer/size")
    accepted = kept.series("collection", "selection/accepted_samples")
    assert sizes == [sum(accepted[: n + 1]) for n in range(4)]
    young = run(*settings, "train.max_policy_age=1")
    accepted = young.series("collection", "selection/accepted_samples")
    assert young.series("collection", "buffer/size")[-1] == accepted[-1] + accepted[-2]
    assert max(young.series("step", "policy/age_max")) == 1
    assert young.series("collection", "buffer/evicted_samples")[-1] == sum(accepted[:-2])


def test_prioritized_sampling_runs_with_importance_weights(run):
    finished = run(
        "train.prioritized_sampling=true", "train.prioritized_sampling_beta=1.0", "env.reward=graded",
        "selection.above=none", "train.topk_size=16",
    )  # fmt: skip
    plain = run(
        "train.prioritized_sampling=true", "train.prioritized_sampling_beta=0.0", "env.reward=graded",
        "selection.above=none", "train.topk_size=16",
    )  # fmt: skip
    # The same draws with other weights: the first step's loss is scaled down.
    losses = [r.records("step")[0].values["loss/main"] for r in (finished, plain)]
    assert 0 < losses[0] < losses[1]


def test_random_control_takes_the_same_number_and_is_worse(run):
    topk, control = run(*LEARNING), run(*LEARNING, "selection.strategy=random")
    first = [run.records("collection")[0].values["selection/accepted_samples"] for run in (topk, control)]
    assert first[0] == first[1]
    assert control.series("collection", "selection/accepted_reward_mean")[0] < 1.0
    assert topk.result.after.accuracy > control.result.after.accuracy + 0.2


def test_collections_that_select_nothing_stop_the_run_with_advice(make_config, tmp_path):
    config = make_config("selection.min_reward=2.0", "train.max_empty_collections=2", "train.total_dialog_turns=1280")
    parts = local.build(config, tmp_path)
    before = {name: tensor.clone() for name, tensor in parts.trainer.policy.merged_state()}
    with pytest.raises(UserError, match="2 collections in a row selected nothing") as raised:
        sync.run(parts)
    assert "selection.min_reward" in str(raised.value)
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] != "collector"]
    assert [line["kind"] for line in lines] == ["eval", "collection", "collection"]
    assert [line.get("selection/empty_collections") for line in lines[1:]] == [1, 2]
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts.trainer.policy.merged_state())


def test_steps_that_stay_broken_stop_the_run_and_leave_their_batch(make_config, tmp_path, monkeypatch):
    config = make_config("train.max_skipped_steps=1", "train.kl_to_ref_coeff=1")
    parts = local.build(config, tmp_path)
    before = {name: tensor.clone() for name, tensor in parts.trainer.policy.merged_state()}
    attach = parts.collector.attach_reference

    def attach_infinities(collection):
        attached = attach(collection)
        for sample in attached.samples:
            sample.ref_log_probs[-1] = math.inf
        return attached

    monkeypatch.setattr(parts.collector, "attach_reference", attach_infinities)
    with pytest.raises(ComponentError, match=r"2 optimizer steps in a row .*train\.max_skipped_steps=1 is the most"):
        sync.run(parts)
    batches = torch.load(tmp_path / "broken_step.pt", weights_only=True)
    assert all(batch["ref_log_probs"].isinf().any() for batch in batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts.trainer.policy.merged_state())
    steps = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["optim/skipped_steps"] for line in steps] == [1, 2]
    assert not list((tmp_path / "checkpoints").iterdir())


def test_an_empty_collection_between_others_takes_no_step(run, monkeypatch):
    """All completions of the second collection are tied, by a bound that only it meets."""
    from expert_iteration.collector import Collector

    collections = 0
    sample = Collector.sample

    def second_is_empty(self):
        nonlocal collections
        collections += 1
        self._selector.min_reward = 2.0 if collections == 2 else None
        return sample(self)

    monkeypatch.setattr(Collector, "sample", second_is_empty)
    finished = run("train.total_dialog_turns=384")
    assert finished.series("collection", "selection/empty_collections") == [0, 1, 0]
    trained = {record.values["progress/collection"] for record in finished.records("step")}
    assert trained == {0, 2}
    # The share of the run that the empty one owns is passed over, and nobody else's.
    first = next(r.values for r in finished.records("step") if r.values["progress/collection"] == 2)
    steps = sum(r.values["progress/collection"] == 2 for r in finished.records("step"))
    assert first["progress/run"] == pytest.approx(2 / 3 + 1 / 3 / steps)
    assert finished.parts.trainer.policy_version == 2


def test_prompts_that_do_not_fit_are_dropped_and_counted(run, tmp_path, make_config):
    folder = tmp_path / "long"
    folder.mkdir()
    rows = [{"question": f"{'#' * n} 3", "answer": "#### 3"} for n in range(1, 100)]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"question": "7", "answer": "#### 7"}))
    # 64 tokens of context less 2 for the response: prompts of up to 60 hashes, a space and a digit fit.
    finished = run(f"env.data_path={folder}", "train.total_dialog_turns=1664")
    assert finished.series("collection", "prompts/dropped_too_long")[-1] == 39
    with pytest.raises(UserError, match="none of the 99 prompts"):
        local.build(
            make_config(f"env.data_path={folder}", "inference_model.max_tokens=63"), tmp_path
        ).collector.sample()


def test_saved_models_on_the_way(run):
    finished = run("train.checkpoint_frequency=2")
    steps = finished.parts.trainer.optimizer_steps
    names = sorted(path.name for path in (finished.folder / "checkpoints").iterdir())
    assert names == sorted({f"checkpoint_{step:04d}" for step in (*range(2, steps + 1, 2), steps)})


def test_cores_are_counted_where_the_system_has_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert local.available_cores() == os.cpu_count()
