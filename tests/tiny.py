"""A tiny model with a tokenizer of its own, as a folder that transformers loads, and data that it can learn."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = list("0123456789 \n?#")
SPECIAL = ["<pad>", "<bos>", "<eos>"]
DIGITS = (3, 5, 7, 8)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of random models of any family."""


def save_tiny_model(folder: Path, *, seed: int = 0, tied: bool = False, **sizes: int) -> Path:
    """A random Llama over single characters, in float32; its tokenizer has no chat template (use `plain`)."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="?"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **sizes,
        },
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_copy_task(folder: Path, rows: int = 60) -> Path:
    """Data in GSM8K's format: repeat the one digit of the question; a tiny model can learn it by sampling."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, start in (("train", 0), ("test", rows)):
        with (folder / f"{split}.jsonl").open("w") as file:
            for number in range(start, start + rows):
                digit = DIGITS[number % len(DIGITS)]
                # A filler without digits makes the questions different and leaves them as hard.
                filler = f"{number // len(DIGITS):b}".replace("0", "?").replace("1", "#")
                question = f"{filler} {digit}"
                file.write(json.dumps({"question": question, "answer": f"#### {digit}"}) + "\n")
    return folder
