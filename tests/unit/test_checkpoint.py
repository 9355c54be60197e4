from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from expert_iteration.atomic import atomic_directory
from expert_iteration.checkpoint import COMPLETE, check_writable, latest, save_model
from expert_iteration.errors import UserError
from expert_iteration.model import Policy

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    ).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "one": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary)), eos_token="</s>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def test_a_saved_model_loads_with_transformers_and_gives_the_same_logits(tmp_path: Path) -> None:
    policy = Policy("tiny", make_model(), torch.float32)
    folder = save_model(policy, make_tokenizer(), tmp_path / "checkpoints", 7, {"run": "test"})
    assert folder == tmp_path / "checkpoints" / "checkpoint_0007"
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, policy.model(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "run": "test",
        "step": 7,
        "base_model": "tiny",
        "is_lora": False,
    }


def test_a_saved_adapter_loads_with_peft_and_gives_the_same_logits(tmp_path: Path) -> None:
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=2, target_modules="all-linear")
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    folder = save_model(Policy("tiny", model, torch.float32), make_tokenizer(), tmp_path, 12345, {})
    assert folder.name == "checkpoint_12345"
    assert set(load_file(folder / "adapter_model.safetensors")) == {
        name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name
    }
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "base")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert not torch.allclose(loaded(IDS).logits, base(IDS).logits)


def test_the_completion_marker_lists_every_file_with_its_checksum(tmp_path: Path) -> None:
    folder = save_model(Policy("tiny", make_model(), torch.float32), make_tokenizer(), tmp_path, 1, {})
    sums = dict(reversed(line.split("  ")) for line in (folder / COMPLETE).read_text().splitlines())
    assert set(sums) == {file.name for file in folder.iterdir()} - {COMPLETE}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_model(Policy("tiny", make_model(seed), torch.float32), make_tokenizer(), tmp_path, 3, {})
    embedding = load_file(tmp_path / "checkpoint_0003" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embedding, make_model(1).model.embed_tokens.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_0003"]


def test_latest_is_the_complete_one_of_the_highest_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for name in (
        "checkpoint_0009",
        "checkpoint_0100",
        "checkpoint_10000",
        "checkpoint_0101-copy",
        ".checkpoint_0999-x",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMPLETE).touch()
    (tmp_path / "checkpoint_20000").mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoint_10000"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with atomic_directory(target, replace=True) as new:
        (new / "file").write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic_directory(target, replace=True) as new:
        (new / "file").write_text("new")
        raise RuntimeError("half way")
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_of_two_writers_at_once_the_first_to_finish_stays_unless_replaced(tmp_path: Path) -> None:
    for replace, kept in ((False, "first to finish"), (True, "last to finish")):
        target = tmp_path / str(replace)
        with atomic_directory(target, replace=replace) as slow:
            (slow / "file").write_text("last to finish")
            with atomic_directory(target, replace=replace) as fast:
                (fast / "file").write_text("first to finish")
            assert (target / "file").read_text() == "first to finish"
        assert (target / "file").read_text() == kept
    assert {path.name for path in tmp_path.iterdir()} == {"False", "True"}


def test_a_folder_that_cannot_be_written_is_reported_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "checkpoints")
    assert list((tmp_path / "new" / "checkpoints").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        check_writable(tmp_path / "file" / "checkpoints")
    (problem,) = caught.value.problems
    assert problem.key == "logging.checkpoint_dir"
    assert str(tmp_path / "file" / "checkpoints") in str(problem)
