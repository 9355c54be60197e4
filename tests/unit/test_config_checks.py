"""Ranges and contradictions: each is refused by name, and its way out is accepted."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from expert_iteration.config import derived
from expert_iteration.config.advice import advice
from expert_iteration.config.checks import leaf_problem, problems
from expert_iteration.config.leaves import leaves, value_of
from expert_iteration.config.loader import load
from expert_iteration.config.schema import RunConfig

CONFIG_DIR = Path(__file__).parents[2] / "config"


SETTINGS = ["train.topk_size=4", "train.total_dialog_turns=768", "env.test_size=256", "eval.num_prompts=256"]
"""On top of the demo's config: what the numbers below were worked out for."""


@pytest.fixture(scope="module")
def demo() -> RunConfig:
    return load(SETTINGS, config_dir=CONFIG_DIR, config_name="ei_demo")


@pytest.fixture
def config(demo: RunConfig) -> RunConfig:
    return deepcopy(demo)


def set_keys(config: RunConfig, keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(config, section) if section else config, name, value)


def keys_of_problems(config: RunConfig) -> list[str]:
    return [problem.key for problem in problems(config)]


def test_the_demo_is_sound(config: RunConfig) -> None:
    assert problems(config) == []


ASYNC = {
    "loop": "async",
    "train.sync_iter": False,
    "train.empty_replay_buffer": False,
    "train.weight_update_frequency": 2,
}


@pytest.mark.parametrize(
    ("keys", "refused", "mended"),
    [
        ({"train.queue_size": 4}, "train.queue_size", {"train.queue_size": None}),
        ({"train.stale_samples": "reissue"}, "train.stale_samples", {"train.stale_samples": "drop"}),
        ({"train.collections_in_flight": 2}, "train.collections_in_flight", ASYNC),
        (ASYNC | {"train.sync_iter": True}, "train.sync_iter", {"train.sync_iter": False}),
        (
            ASYNC | {"train.empty_replay_buffer": True},
            "train.empty_replay_buffer",
            {"train.weight_update_frequency": None},
        ),
        (ASYNC | {"train.stale_samples": "reissue"}, "train.stale_samples", {"train.max_policy_age": 0}),
        (
            {"train.shuffle": "groups", "train.prioritized_sampling": True},
            "train.shuffle",
            {"train.prioritized_sampling": False},
        ),
        (
            {"inference_model.backend": "local", "inference_model.tensor_parallel_size": 2},
            "inference_model.tensor_parallel_size",
            {"inference_model.backend": "vllm", "inference_model.num_devices": 2},
        ),
        (
            {"inference_model.num_devices": 3, "inference_model.tensor_parallel_size": 2},
            "inference_model.num_devices",
            {"inference_model.num_devices": 4},
        ),
        (
            {"inference_model.backend": "local", "inference_model.quantization": "fp8"},
            "inference_model.quantization",
            {"inference_model.quantization": None},
        ),
    ],
)
def test_keys_of_loops_and_engines_that_contradict_each_other(
    config: RunConfig, keys: dict[str, Any], refused: str, mended: dict[str, Any]
) -> None:
    set_keys(config, keys)
    assert refused in keys_of_problems(config)
    set_keys(config, mended)
    assert keys_of_problems(config) == []


@pytest.mark.parametrize("leaf", [leaf for leaf in leaves() if leaf.type is float], ids=lambda leaf: leaf.key)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_EI_43_no_number_may_be_nan_or_infinite(leaf: Any, value: float) -> None:
    problem = leaf_problem(leaf, value)
    assert problem is not None
    assert problem.key == leaf.key


@pytest.mark.parametrize("leaf", [leaf for leaf in leaves() if leaf.type is str], ids=lambda leaf: leaf.key)
def test_EI_43_no_text_may_be_empty(leaf: Any) -> None:
    assert leaf_problem(leaf, "") is not None
    assert leaf_problem(leaf, "  ") is not None


@pytest.mark.parametrize(
    ("key", "refused", "accepted"),
    [
        ("seed", -1, 0),
        ("seed", 2**31, 2**31 - 1),
        ("train.topk_size", 0, 1),
        ("train.prioritized_sampling_beta", 1.1, 1.0),
        ("train.prioritized_sampling_epsilon", 0.0, 1e-9),
        ("train.kl_to_ref_coeff", -0.1, 0.0),
        ("train_model.lora.dropout", 1.0, 0.9),
        ("inference_model.temperature", 0.0, 0.1),
        ("inference_model.top_p", 0.0, 1.0),
        ("optimizer.lr", 0.0, 1e-9),
        ("selection.strategy", "best", "topk"),
        ("train.shuffle", "prompts", "groups"),
        ("env.dataset", "imagenet", "gsm8k"),
    ],
)
def test_range_of_one_key(key: str, refused: Any, accepted: Any) -> None:
    (leaf,) = (leaf for leaf in leaves() if leaf.key == key)
    problem = leaf_problem(leaf, refused)
    assert problem is not None
    assert (problem.key, problem.value) == (key, refused)
    assert leaf_problem(leaf, accepted) is None


def test_choice_names_the_value_that_was_meant() -> None:
    by_key = {leaf.key: leaf for leaf in leaves()}
    assert "optimizer.name=adamw" in str(leaf_problem(by_key["optimizer.name"], "AdamW"))
    scheduler = leaf_problem(by_key["optimizer.scheduler.type"], "cosine_with_warmup")
    assert "optimizer.scheduler.type=cosine" in str(scheduler)


GCD = {"generator": "gcd"}
CONTRADICTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("train.topk_size", {"train.topk_size": 17}, {"train.topk_size": 16}),
    ("train.dialog_turns_per_batch", {"train.dialog_turns_per_batch": 100}, {"train.dialog_turns_per_batch": 96}),
    ("train.dialog_turns_per_batch", {"train.dialog_turns_per_batch": 8}, {"train.dialog_turns_per_batch": 16}),
    ("train.dialog_turns_per_batch", {"env.repeats": 12}, {"env.repeats": 8}),
    ("train.buffer_size", {"train.buffer_size": 63}, {"train.buffer_size": 64}),
    (
        "train.weight_update_frequency",
        {"train.sync_iter": False, "train.weight_update_frequency": 2},
        {"train.weight_update_frequency": None},
    ),
    ("train.max_policy_age", {"train.sync_iter": False, "train.max_policy_age": 0}, {"train.max_policy_age": 1}),
    (
        "train.kl_to_ref_schedule.end_value",
        {"train.kl_to_ref_schedule.end_value": 0.5},
        {"train.kl_to_ref_schedule.type": "linear"},
    ),
    (
        "train.kl_to_ref_schedule.end_value",
        {"train.kl_to_ref_schedule.type": "cosine"},
        {"train.kl_to_ref_schedule.end_value": 0.0},
    ),
    (
        "train.kl_to_ref_schedule.type",
        {
            "train.kl_to_ref_coeff": 0.0,
            "train.kl_to_ref_schedule.type": "linear",
            "train.kl_to_ref_schedule.end_value": 0.0,
        },
        {"train.kl_to_ref_schedule.end_value": 0.5},
    ),
    (
        "train.mixed_precision",
        {"train.mixed_precision": True, "train_model.torch_dtype": "float32"},
        {"train_model.torch_dtype": "auto"},
    ),
    (
        "train_model.torch_dtype",
        {"train.mixed_precision": False, "train_model.torch_dtype": "bfloat16"},
        {"train.mixed_precision": True},
    ),
    (
        "optimizer.scheduler.warmup_steps",
        {"optimizer.scheduler.warmup_steps": 48},
        {"optimizer.scheduler.warmup_steps": 47},
    ),
    (
        "optimizer.scheduler.warmup_steps",
        {"optimizer.scheduler.warmup_steps": 48},
        {"optimizer.scheduler.enabled": False},
    ),
    ("env.prompt_template", {"env.prompt_template": "Solve this"}, {"env.prompt_template": "Solve {question}"}),
    ("env.prompt_template", {"env.prompt_template": "{question} {"}, {"env.prompt_template": "{question} {{"}),
    ("env.prompt_template", {"env.prompt_template": "{question} {x}"}, {"env.prompt_template": "{question} {{x}}"}),
    ("env.options.generator", {"env.options": {}}, {"env.options": {"generator": "gcd"}}),
    ("env.options.generators", {"env.options": {"generators": []}}, {"env.options": {"generators": [GCD]}}),
    (
        "env.options.generators",
        {"env.options": {"generator": "gcd", "generators": [GCD]}},
        {"env.options": {"generator": None, "generators": [GCD]}},
    ),
    (
        "env.options.generators[1].weight",
        {"env.options": {"generators": [GCD, GCD | {"weight": math.inf}]}},
        {"env.options": {"generators": [GCD, GCD | {"weight": 2.0}]}},
    ),
    (
        "env.options.generators",
        {"env.dataset": "countdown", "env.options": {"generators": [GCD]}},
        {"env.dataset": "reasoning_gym"},
    ),
    (
        "env.options.generator",
        {"env.dataset": "countdown", "env.options": {"generator": "gcd"}},
        {"env.options": {"max_numbers": 4}},
    ),
    (
        "env.data_path",
        {"env.dataset": "countdown", "env.options": {}, "env.data_path": "rows.jsonl"},
        {"env.data_path": None},
    ),
    (
        "env.options.generator",
        {"env.dataset": "gsm8k", "env.options": {"generator": "gcd"}},
        {"env.options": {"length_limit": 500}},
    ),
    (
        "env.reward_weights.style",
        {"env.dataset": "gsm8k", "env.options": {}, "env.reward": "graded", "env.reward_weights": {"style": 1.0}},
        {"env.reward_weights": {"length": 1.0}},
    ),
    (
        "env.reward_weights",
        {"env.dataset": "gsm8k", "env.options": {}, "env.reward": "exact", "env.reward_weights": {"length": 1.0}},
        {"env.reward": "graded"},
    ),
    (
        "env.options.a.b",
        {"env.options": {"generator": "gcd", "a": {"b": math.nan}}},
        {"env.options": {"generator": "x"}},
    ),
    ("env.data_path", {"env.data_path": "rows.jsonl"}, {"env.data_path": None}),
    ("eval.num_prompts", {"env.test_size": 255}, {"eval.num_prompts": None}),
    ("eval.num_prompts", {"env.test_size": None, "eval.num_prompts": 501}, {"eval.num_prompts": 500}),
    (
        "eval.num_prompts",
        {"env.dataset": "countdown", "env.options": {}, "env.test_size": None, "eval.num_prompts": 501},
        {"eval.num_prompts": 500},
    ),
    ("eval.num_prompts", {"env.test_size": 8, "eval.at_end": False}, {"eval.at_start": False}),
]


@pytest.mark.parametrize(("key", "contradiction", "way_out"), CONTRADICTIONS)
def test_contradiction_is_refused_and_its_way_out_accepted(
    config: RunConfig, key: str, contradiction: dict[str, Any], way_out: dict[str, Any]
) -> None:
    set_keys(config, contradiction)
    assert keys_of_problems(config) == [key]
    set_keys(config, way_out)
    assert problems(config) == []


def test_everything_is_reported_at_once(config: RunConfig) -> None:
    set_keys(
        config,
        {"train.topk_size": 99, "optimizer.lr": math.nan, "selection.above": "mode", "env.prompt_template": "{q}"},
    )
    assert keys_of_problems(config) == [
        "selection.above",
        "optimizer.lr",
        "train.topk_size",
        "env.prompt_template",
        "env.prompt_template",
    ]


def test_a_key_with_a_problem_causes_no_second_one(config: RunConfig) -> None:
    set_keys(config, {"env.repeats": 0, "train.epochs": "???", "train.kl_to_ref_schedule.end_value": 0.5})
    assert keys_of_problems(config) == ["env.repeats", "train.kl_to_ref_schedule.end_value"]


def test_problem_has_value_constraint_and_way_out(config: RunConfig) -> None:
    config.train.topk_size = 40
    (problem,) = problems(config)
    assert str(problem) == (
        "train.topk_size=40: top-k chooses among the env.repeats=16 completions of one prompt and cannot keep more; "
        "lower train.topk_size or raise env.repeats."
    )


def test_advice_on_topk_is_silent_between_10_and_20_percent(config: RunConfig) -> None:
    def about_topk() -> list[str]:
        return [remark for remark in advice(config) if "topk_size" in remark]

    (remark,) = about_topk()
    assert remark == "train.topk_size=4 keeps 25% of env.repeats=16; 10 to 20% is a good start."
    config.train.topk_size = 2
    assert about_topk() == []
    config.train.topk_size = 1
    assert len(about_topk()) == 1


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"train.total_dialog_turns": 10, "optimizer.scheduler.enabled": False}, "train.total_dialog_turns=10"),
        ({"env.train_size": 10}, "env.train_size=10"),
        ({"train.gradient_accumulation_steps": 16}, "128 samples"),
        ({"train.max_policy_age": 0, "train.empty_replay_buffer": False}, "train.empty_replay_buffer=false"),
        ({"eval.at_end": False}, "eval.num_transcripts=3"),
    ],
)
def test_advice_never_refuses(config: RunConfig, keys: dict[str, Any], named: str) -> None:
    config.train.topk_size = 2
    config.optimizer.scheduler.warmup_steps = 0
    assert advice(config) == []
    set_keys(config, keys)
    (remark,) = advice(config)
    assert named in remark
    config.train.gradient_accumulation_steps = 1
    assert problems(config) == []


INTEGRALS = {"generator": "simple_integration"}


@pytest.mark.parametrize(
    ("dataset", "options", "workers"),
    [
        ("gsm8k", {}, 0),
        ("math", {}, 2),
        ("custom", {}, 2),
        ("countdown", {"max_numbers": 4}, 0),
        ("reasoning_gym", GCD, 0),
        ("reasoning_gym", {"generators": [GCD, GCD]}, 0),
        ("reasoning_gym", INTEGRALS, 2),
        ("reasoning_gym", {"generator": "codeio"}, 2),
        ("reasoning_gym", {"generators": [GCD, INTEGRALS]}, 2),
        ("reasoning_gym", {"generator": "composite", "datasets": [{"name": "simple_integration", "weight": 1}]}, 2),
    ],
)
def test_what_may_take_long_to_score_gets_processes_of_its_own(
    config: RunConfig, dataset: str, options: dict[str, Any], workers: int
) -> None:
    set_keys(config, {"env.dataset": dataset, "env.options": options, "env.verifier_workers": None})
    assert derived.verifier_workers(config) == workers
    set_keys(config, {"env.verifier_workers": 1})
    assert derived.verifier_workers(config) == 1
