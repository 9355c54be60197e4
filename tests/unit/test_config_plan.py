"""The plan: devices, sequences in flight and memory, by hand for a tiny model."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig

from expert_iteration.config.loader import load
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import UserError
from expert_iteration.runtime.plan import (
    GIB,
    device_plan,
    estimate_memory,
    kv_bytes_per_token,
    render_plan,
    sequences_in_flight,
)

CONFIG_DIR = Path(__file__).parents[2] / "config"
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# Embedding 64 x 32, tied; per layer q and o 32 x 32, k and v 32 x 16, three of 32 x 48, two norms of 32; a last norm.
LINEARS = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3)
LLAMA_PARAMETERS = 64 * 32 + LINEARS + 2 * 2 * 32 + 32


SETTINGS = ["train.topk_size=4", "train.total_dialog_turns=768", "env.test_size=256", "eval.num_prompts=256"]
"""On top of the demo's config: what the numbers below were worked out for."""


@pytest.fixture(scope="module")
def demo() -> RunConfig:
    config = load(SETTINGS, config_dir=CONFIG_DIR, config_name="ei_demo")
    config.train_model.torch_dtype = config.inference_model.torch_dtype = config.ref_model.torch_dtype = "float32"
    return config


@pytest.fixture
def config(demo: RunConfig) -> RunConfig:
    return deepcopy(demo)


def names(devices: tuple[torch.device, ...]) -> list[str]:
    return [str(device) for device in devices]


def test_devices_are_given_out_in_turn(config: RunConfig) -> None:
    config.train_model.num_devices = config.inference_model.num_devices = 2
    plan = device_plan(config, num_gpus=4)
    assert names(plan.train) == ["cuda:0", "cuda:1"]
    assert names(plan.inference) == ["cuda:2", "cuda:3"]
    assert names(plan.reference) == ["cuda:0"]


def test_without_gpus_everything_shares_one_slot(config: RunConfig) -> None:
    config.train_model.num_devices = 2
    plan = device_plan(config, num_gpus=0)
    assert names(plan.train + plan.inference + plan.reference) == ["cpu"] * 4


def test_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(LLAMA, torch.float32) == 2 * 2 * 2 * 8 * 4
    assert kv_bytes_per_token(LLAMA, torch.bfloat16) == 2 * 2 * 2 * 8 * 2
    gpt2 = GPT2Config(n_layer=3, n_head=4, n_embd=64)
    assert kv_bytes_per_token(gpt2, torch.float32) == 2 * 3 * 64 * 4


def test_sequences_in_flight_follow_from_the_budget(config: RunConfig) -> None:
    # Prompts count once for their 16 samples, 512 tokens each; a sample holds 487 tokens of its own.
    config.inference_model.max_tokens = 488
    config.inference_model.kv_cache_gib = 3500 * 256 / GIB
    assert sequences_in_flight(config, LLAMA) == 4  # 3 prompts: 3 * 512 + 4 * 487 = 3484
    config.inference_model.torch_dtype = "bfloat16"
    assert sequences_in_flight(config, LLAMA) == 11  # of 7000 tokens, 3 * 512 + 11 * 487 = 6893
    config.env.num_envs = 5
    assert sequences_in_flight(config, LLAMA) == 5


def test_a_budget_below_one_sequence_is_refused(config: RunConfig) -> None:
    config.inference_model.kv_cache_gib = 1e-6
    with pytest.raises(UserError, match=r"inference_model.kv_cache_gib=1e-06: does not hold one sequence"):
        sequences_in_flight(config, LLAMA)


def test_memory_of_full_fine_tuning(config: RunConfig) -> None:
    config.inference_model.torch_dtype = "bfloat16"
    estimate = estimate_memory(config, LLAMA)
    assert estimate.num_parameters == estimate.num_trained == LLAMA_PARAMETERS
    assert estimate.trained_model == estimate.gradients == estimate.reference == 4 * LLAMA_PARAMETERS
    assert estimate.optimizer == 8 * LLAMA_PARAMETERS
    assert estimate.engine == 2 * LLAMA_PARAMETERS
    assert estimate.kv_cache == 2 * GIB
    assert estimate.total == 22 * LLAMA_PARAMETERS + 2 * GIB


def test_memory_of_lora_counts_the_adapter_and_no_reference(config: RunConfig) -> None:
    config.train_model.lora.enabled, config.train_model.lora.r = True, 3
    adapter = 3 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    estimate = estimate_memory(config, LLAMA)
    assert estimate.num_trained == adapter
    assert estimate.trained_model == 4 * (LLAMA_PARAMETERS + adapter)
    assert (estimate.gradients, estimate.optimizer, estimate.reference) == (4 * adapter, 8 * adapter, 0)
    config.train.mixed_precision, config.train_model.torch_dtype = True, "bfloat16"
    assert estimate_memory(config, LLAMA).trained_model == 2 * LLAMA_PARAMETERS + 4 * adapter


def test_nothing_is_kept_for_a_reference_that_nothing_reads(config: RunConfig) -> None:
    config.train.kl_to_ref_coeff = 0.0
    assert estimate_memory(config, LLAMA).reference == 0
    config.train.loss_function = "minor_sft"
    assert estimate_memory(config, LLAMA).reference == 4 * LLAMA_PARAMETERS


def test_plan_of_a_model_on_this_machine(config: RunConfig, tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path)
    config.model.name = str(tmp_path)
    lines = [" ".join(line.split()) for line in render_plan(config).splitlines()]
    for expected in (
        f"name: {tmp_path}",
        "collections 3 of 256 completions, 768 in all",
        "prompts per collection 16, 16 completions each",
        "kept per collection at most 64",
        "replay buffer 64 samples",
        "optimizer batch 8 samples",
        "optimizer steps at most 48, the length of both schedules",
        "sequences in flight 256",
        f"trained model 0.00 GiB {LLAMA_PARAMETERS:,} parameters",
    ):
        assert expected in lines
    config.inference_model.kv_cache_gib = 1e-6
    with pytest.raises(UserError):
        render_plan(config)


def test_plan_tells_expert_data(config: RunConfig) -> None:
    config.model.name = "org/absent"
    assert "expert data " not in render_plan(config)
    config.env.expert_data, config.env.expert_share = "experts.jsonl", 0.5
    lines = [" ".join(line.split()) for line in render_plan(config).splitlines()]
    assert "expert data at most 2 of the 4 kept of a group, from experts.jsonl" in lines


@pytest.mark.parametrize("name", ["org/absent", "package:absent_package", "package:json"])
def test_plan_of_a_model_that_is_not_here_says_what_is_left_out(
    config: RunConfig, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.model.name = name
    text = render_plan(config)
    assert f"not estimated: {name} cannot be read: " in text
    assert "sequences in flight       not known without the model's sizes" in text
    config.env.num_envs = 7
    assert "sequences in flight       7" in render_plan(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs does")
def test_plan_says_what_is_shared(config: RunConfig) -> None:
    config.model.name, config.train_model.num_devices = "org/absent", 2
    assert "train_model               2 asked, 1 process slot on cpu (shares)" in render_plan(config)


def test_a_reward_model_has_its_place_in_the_plan(config: RunConfig, tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path / "policy")
    bert = BertConfig(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=20, type_vocab_size=2, num_labels=1,
    )  # fmt: skip
    bert.save_pretrained(tmp_path / "bert")
    # Embeddings of 10 ids, 20 positions and 2 types; attention of four 8 x 8, feed-forward of 8 x 12 and 12 x 8, each
    # with biases; three norms; the pooler and the output.
    parameters = (10 + 20 + 2) * 8 + 4 * (64 + 8) + (96 + 12) + (96 + 8) + 3 * 2 * 8 + (64 + 8) + (8 + 1)
    config.model.name, config.reward_model.name = str(tmp_path / "policy"), str(tmp_path / "bert")
    config.reward_model.device, config.reward_model.offload, config.reward_model.torch_dtype = "cpu", True, "bfloat16"
    without = deepcopy(config)
    without.reward_model.name = None
    estimate = estimate_memory(config, LLAMA)
    assert estimate.reward_model == 2 * parameters
    assert estimate.total == estimate_memory(without, LLAMA).total + 2 * parameters
    text = render_plan(config)
    assert "reward_model              uses cpu, on the CPU between uses" in text
    assert "reward model             0.00 GiB   reward_model.torch_dtype=bfloat16" in text
    assert "reward model  " not in render_plan(without)


@pytest.mark.parametrize(("name", "device"), [("org/absent", None), ("bert", f"cuda:{torch.cuda.device_count()}")])
def test_plan_of_a_reward_model_that_is_not_here(
    config: RunConfig, name: str, device: str | None, tmp_path: Path
) -> None:
    LLAMA.save_pretrained(tmp_path / "policy")
    BertConfig(num_labels=1).save_pretrained(tmp_path / "bert")
    config.model.name = str(tmp_path / "policy")
    config.reward_model.name = str(tmp_path / name) if name == "bert" else name
    config.reward_model.device = device
    text = render_plan(config)
    assert f"not counted: {config.reward_model.name} or its device is not on this machine" in text
    assert f"reward_model              uses {device or 'c'}" in text
