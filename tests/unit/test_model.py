from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from expert_iteration import model as model_module
from expert_iteration import model_source
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import UserError
from expert_iteration.model import (
    ADAPTER,
    Policy,
    disable_dropout,
    load_inference_model,
    load_policy,
    load_reference_model,
    resolve_dtype,
)
from expert_iteration.model_source import check_model, load_tokenizer, resolve_model
from tests.tiny import SIZES

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tied embeddings, without tokenizer."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    ).save_pretrained(path)
    return path


def make_config(folder: Path, *, lora: bool = False, dtype: str | None = None, seed: int = 0) -> RunConfig:
    """`dtype` switches mixed precision on."""
    config = RunConfig()
    config.seed = seed
    config.model.name = str(folder)
    config.model.trust_remote_code = False
    config.model.compile = False
    config.train.mixed_precision = dtype is not None
    config.train_model.torch_dtype = dtype or "float32"
    config.train_model.attn_implementation = "sdpa"
    config.train_model.gradient_checkpointing = False
    config.train_model.lora.enabled = lora
    config.train_model.lora.r = 4
    config.train_model.lora.alpha = 6.0
    config.train_model.lora.dropout = 0.0
    return config


def fill_lora_b(policy: Policy, value: float = 0.05) -> None:
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(value)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "expected"),
    [(True, False, torch.bfloat16), (False, True, torch.bfloat16), (False, False, torch.float32)],
)
def test_auto_dtype_on_cpu_follows_its_instructions(
    monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert resolve_dtype("auto", CPU) == expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_auto_dtype_on_cuda_follows_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.device("cuda")) == expected


def test_named_dtypes() -> None:
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(ValueError, match="int3"):
        resolve_dtype("int3", CPU)


def test_a_complete_folder_passes_and_is_its_own_place(folder: Path) -> None:
    check_model(str(folder))
    assert resolve_model(str(folder)) == folder


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def set_model_type(model_type: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": model_type})) and None


@pytest.mark.parametrize(
    ("damage", "constraint"),
    [
        (remove_weights, "no weights"),
        (remove_config, "no config.json"),
        (set_model_type("no-such-type"), "no-such-type"),
        (set_model_type("t5"), "t5 is not a causal language model"),
        (lambda folder: (folder / "config.json").write_text("{") and None, "not a valid JSON"),
    ],
)
def test_incomplete_folders_are_refused(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], constraint: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        check_model(str(tmp_path))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("model.name", str(tmp_path))
    assert constraint in problem.constraint


@pytest.mark.parametrize(
    ("name", "constraint"),
    [
        ("package:no_such_package_here", "no Python package 'no_such_package_here' is installed"),
        ("package:not-a-name", "no Python package 'not-a-name'"),
        ("package:pytest", "exactly one .gguf file, found none"),
        ("./no/such/folder", "there is no such folder"),
        ("/no/such/folder", "there is no such folder"),
        ("no/such/file.gguf", "there is no such file"),
    ],
)
def test_names_of_nothing_are_refused(name: str, constraint: str) -> None:
    with pytest.raises(UserError) as caught:
        check_model(name)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("model.name", name)
    assert constraint in problem.constraint


def test_a_hub_name_without_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model_source._hub_unreachable.cache_clear()
    with pytest.raises(UserError, match="cannot be reached"):
        check_model("organisation-of-nobody/no-model")
    model_source._hub_unreachable.cache_clear()


def test_the_package_of_a_model_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "carries_two_models"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("one.gguf", "two.gguf"):
        (package / name).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"found one\.gguf, two\.gguf"):
        check_model("package:carries_two_models")
    (package / "two.gguf").unlink()
    check_model("package:carries_two_models")
    (package / "one.gguf").write_bytes(b"HTML")
    with pytest.raises(UserError, match=r"one\.gguf is not a GGUF file"):
        check_model("package:carries_two_models")
    assert "carries_two_models" not in sys.modules


def test_EI_21_a_folder_with_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    load_policy(make_config(folder, lora=True), CPU).model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    with pytest.raises(UserError, match="merge it first"):
        check_model(str(tmp_path))


def test_a_model_without_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name"):
        load_tokenizer(str(folder))


def test_weights_that_are_missing_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        load_policy(make_config(tmp_path), CPU)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match=r"model\.name"):
        load_policy(make_config(tmp_path), CPU)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_full_fine_tuning_trains_every_weight_in_float32(folder: Path, dtype: str | None) -> None:
    policy = load_policy(make_config(folder, dtype=dtype), CPU)
    assert not policy.is_lora
    assert len(policy.trainable_parameters()) == len(list(policy.model.parameters()))
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    with policy.autocast():
        assert logits(policy.model).dtype == (torch.bfloat16 if dtype else torch.float32)
    with pytest.raises(ValueError, match="no adapter"):
        policy.disable_adapter()


@pytest.mark.parametrize(("dtype", "base"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_lora_trains_float32_adapters_alone(folder: Path, dtype: str | None, base: torch.dtype) -> None:
    policy = load_policy(make_config(folder, lora=True, dtype=dtype), CPU)
    assert policy.is_lora
    trained = {name: parameter for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    # Seven linear layers in each of two blocks, A and B each; the head is tied to the embedding and left alone.
    assert len(trained) == len(policy.trainable_parameters()) == 28
    assert all("lora_" in name for name in trained)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert {parameter.dtype for name, parameter in policy.model.named_parameters() if name not in trained} == {base}


@pytest.mark.parametrize("lora", [False, True])
def test_EI_24_a_step_of_1e_6_moves_weights_under_mixed_precision(folder: Path, lora: bool) -> None:
    policy = load_policy(make_config(folder, lora=lora, dtype="bfloat16"), CPU)
    parameter = policy.trainable_parameters()[0]
    with torch.no_grad():
        parameter.fill_(0.02)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, weight_decay=0.0)
    for _ in range(200):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    # bfloat16 would still hold 0.02001953125.
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.0198), atol=1e-7, rtol=0)


def test_EI_21_a_fresh_adapter_and_a_disabled_one_are_the_starting_model(folder: Path) -> None:
    start = logits(load_policy(make_config(folder), CPU).model)
    policy = load_policy(make_config(folder, lora=True), CPU)
    assert torch.equal(logits(policy.model), start)
    fill_lora_b(policy)
    assert not torch.allclose(logits(policy.model), start, atol=1e-3)
    with policy.disable_adapter():
        assert torch.equal(logits(policy.model), start)


def test_adapters_start_from_the_runs_seed_alone(folder: Path) -> None:
    starts = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(starts))
        before = torch.get_rng_state()
        policy = load_policy(make_config(folder, lora=True, seed=seed), CPU)
        assert torch.equal(torch.get_rng_state(), before)
        starts.append(torch.cat([parameter.detach().flatten() for parameter in policy.trainable_parameters()]))
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_EI_22_fifty_merges_leave_a_bfloat16_base_bit_identical(folder: Path) -> None:
    policy = load_policy(make_config(folder, lora=True, dtype="bfloat16"), CPU)
    fill_lora_b(policy)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    for _ in range(50):
        merged = dict(policy.merged_state())
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dtype == before[name].dtype
    # B is 0.05 everywhere and the scale 6 / 4, so that each row of scale * B A is 0.075 times the sum of A's rows.
    layer = "model.layers.1.mlp.down_proj"
    prefix = f"base_model.model.{layer}"
    base, a = before[f"{prefix}.base_layer.weight"], before[f"{prefix}.lora_A.default.weight"]
    assert base.dtype == torch.bfloat16
    torch.testing.assert_close(merged[f"{layer}.weight"], base.float() + 0.075 * a.sum(0))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_are_those_that_peft_merges(family: str) -> None:
    """GPT-2 keeps its weights transposed."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = GPT2Config(**sizes) if family == "gpt2" else LlamaConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", fan_in_fan_out=family == "gpt2")
    policy = Policy(family, get_peft_model(model, lora, adapter_name=ADAPTER), torch.float32)
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    merged = dict(policy.merged_state())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert layers
    for name, layer in layers.items():
        expected = layer.base_layer.weight + layer.get_delta_weight(ADAPTER)
        torch.testing.assert_close(merged[f"{name}.weight"], expected)


@pytest.mark.parametrize("lora", [False, True])
def test_merged_state_is_the_same_model_without_adapter(folder: Path, lora: bool) -> None:
    policy = load_policy(make_config(folder, lora=lora), CPU)
    fill_lora_b(policy)
    plain = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    merged = dict(policy.merged_state())
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    assert not any(tensor.requires_grad for tensor in merged.values())
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(policy.model.eval()), atol=1e-5, rtol=1e-5)


def test_merged_state_has_persistent_buffers_and_no_others(folder: Path) -> None:
    policy = load_policy(make_config(folder), CPU)
    policy.model.register_buffer("kept", torch.tensor([3.0]))
    policy.model.register_buffer("recomputed", torch.tensor([4.0]), persistent=False)
    merged = dict(policy.merged_state())
    assert merged["kept"].tolist() == [3.0]
    assert "recomputed" not in merged


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(folder: Path, lora: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        config = make_config(folder, lora=lora)
        config.train_model.gradient_checkpointing = checkpointing
        policy = load_policy(config, CPU)
        fill_lora_b(policy)
        base = policy.model.get_base_model() if isinstance(policy.model, PeftModel) else policy.model
        assert base.is_gradient_checkpointing == checkpointing
        policy.model.train()
        policy.model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in policy.trainable_parameters()])
    for without, with_checkpointing in zip(*gradients, strict=True):
        assert without is not None
        assert without.abs().max() > 0
        torch.testing.assert_close(without, with_checkpointing)


def test_copies_of_engine_and_reference_are_frozen_in_their_own_dtype(folder: Path) -> None:
    config = make_config(folder)
    config.inference_model.torch_dtype = "bfloat16"
    config.ref_model.torch_dtype = "float32"
    config.ref_model.attn_implementation = "eager"
    engine, reference = load_inference_model(config, CPU), load_reference_model(config, CPU)
    assert (engine.dtype, engine.config._attn_implementation) == (torch.bfloat16, "sdpa")
    assert (reference.dtype, reference.config._attn_implementation) == (torch.float32, "eager")
    for model in (engine, reference):
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_command_line_reports_what_it_cannot_find(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_module.main([str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert model_module.main(["./no/such/folder"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_of_the_base_model_is_off(family: str) -> None:
    """In modules (GPT-2) and in attributes that attention reads (Llama)."""
    torch.manual_seed(0)
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                attention_dropout=0.5,
            )
        )
    ids = torch.arange(8).unsqueeze(0)
    model.train()
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits), "this model drops nothing to begin with"
        disable_dropout(model)
        assert torch.equal(model(ids).logits, model(ids).logits)
