"""From plain values to the typed config: unknown, missing, blank and mistyped keys."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING, OmegaConf

from expert_iteration.config.build import Unresolved, build, nearest_keys

CONFIG_DIR = Path(__file__).parents[2] / "config"


@pytest.fixture
def values() -> dict[str, Any]:
    """Every key of the schema, as plain values."""
    merged = OmegaConf.merge(
        OmegaConf.load(CONFIG_DIR / "ei_gsm8k.yaml"), OmegaConf.load(CONFIG_DIR / "mode/sync.yaml")
    )
    plain = OmegaConf.to_container(merged)
    assert isinstance(plain, dict)
    del plain["defaults"]
    return {str(key): deepcopy(value) for key, value in plain.items()}


def problem_lines(values: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in build(values)[1]]


def test_values_become_a_typed_config(values: dict[str, Any]) -> None:
    config, problems = build(values)
    assert problems == []
    assert (config.train.topk_size, config.env.repeats, config.train_model.lora.r) == (4, 32, 16)
    assert config.env.num_envs is None
    assert type(config.train.kl_to_ref_coeff) is float


def test_EI_43_float_without_fraction_is_the_integer(values: dict[str, Any]) -> None:
    values["train"]["epochs"] = 1e3
    config, problems = build(values)
    assert problems == []
    assert config.train.epochs == 1000
    assert type(config.train.epochs) is int


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "epochs", 1.5),
        ("train", "epochs", True),
        ("train", "epochs", "3"),
        ("train", "epochs", None),
        ("train", "epochs", [3]),
        ("train", "epochs", float("nan")),
        ("train", "epochs", float("inf")),
        ("optimizer", "lr", "1e-5"),
        ("optimizer", "lr", ""),
        ("optimizer", "lr", False),
        ("train", "mixed_precision", 1),
        ("train", "mixed_precision", "true"),
        ("env", "dataset", None),
        ("env", "options", "generator"),
        ("env", "options", None),
        ("env", "data_path", "None"),
        ("env", "data_path", "none"),
        ("env", "num_envs", "None"),
        ("model", "name", "None"),
        ("model", "name", True),
        ("train", "exp_name", 1.5),
    ],
)
def test_EI_43_wrong_type_is_refused_by_name(values: dict[str, Any], section: str, name: str, value: Any) -> None:
    values[section][name] = value
    config, (problem,) = build(values)
    assert problem.key == f"{section}.{name}"
    assert getattr(getattr(config, section), name) == MISSING


def test_the_word_none_is_a_choice_where_it_is_one(values: dict[str, Any]) -> None:
    values["selection"]["above"] = "none"
    assert build(values)[1] == []


def test_EI_43_None_for_an_optional_text_names_null_as_the_way_out(values: dict[str, Any]) -> None:
    values["logging"]["experiment_name"] = "None"
    (line,) = problem_lines(values)
    assert line == (
        "logging.experiment_name=None: has to be text; this is the word 'None', not a blank; "
        "write logging.experiment_name=null for blank."
    )


def test_unknown_keys_are_all_reported_with_the_nearest_key(values: dict[str, Any]) -> None:
    values["train"]["lr"] = 1
    values["train"]["topk_sizes"] = 1
    values["zzz"] = {"qqq": 1, "repeats": 2}
    assert problem_lines(values) == [
        "zzz.qqq=1: no such key; docs/configuration.md lists every key.",
        "zzz.repeats=2: no such key; perhaps env.repeats is meant.",
        "train.lr=1: no such key; perhaps optimizer.lr is meant.",
        "train.topk_sizes=1: no such key; perhaps train.topk_size is meant.",
    ]


def test_nearest_keys() -> None:
    assert nearest_keys("train.lrr") == ["optimizer.lr"]
    assert nearest_keys("torch_dtype") == [
        "reward_model.torch_dtype",
        "train_model.torch_dtype",
        "inference_model.torch_dtype",
        "ref_model.torch_dtype",
    ]
    assert nearest_keys("sed") == ["seed"]
    assert nearest_keys("qqqqqq") == []


def test_missing_keys_are_one_problem(values: dict[str, Any]) -> None:
    del values["seed"], values["selection"]
    values["train"]["epochs"] = MISSING
    _, (problem,) = build(values)
    assert problem.key == (
        "seed, selection.strategy, selection.above, selection.min_reward, selection.include_truncated, train.epochs"
    )


def test_a_value_in_place_of_a_group(values: dict[str, Any]) -> None:
    values["train"] = 5
    assert problem_lines(values) == ["train=5: a group of keys; set its keys, as in train.exp_name=...."]


def test_EI_43_interpolation_to_a_missing_key(values: dict[str, Any]) -> None:
    values["train"]["epochs"] = Unresolved("${no.such}", "no key no.such")
    values["env"]["options"] = {"nested": [Unresolved("${a}", "no key a")], "empty": MISSING}
    assert [str(p).partition(";")[0] for p in build(values)[1]] == [
        "env.options.nested[0]=${a}: no key a",
        "train.epochs=${no.such}: no key no.such",
    ]
