"""Saved models: folders that transformers or peft load, complete or not there."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from expert_iteration.atomic import atomic_directory
from expert_iteration.errors import Problem, UserError
from expert_iteration.model import Policy

COMPLETE = "COMPLETE"
"""Name of the file that marks a complete checkpoint: its SHA-256 sums, as `sha256sum --check` reads them."""


def save_model(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, directory: Path, step: int, metadata: Mapping[str, Any]
) -> Path:
    """Saves the policy as it is after `step` optimizer steps and returns the folder, `directory`/checkpoint_NNNN.

    The folder holds the float32 weights, or with LoRA the adapter, whose config names the base model; the tokenizer
    with its chat template; metadata.json with `metadata`, the step and the name of the model that training started
    from. It appears at once, complete and on disk; one of the same name is replaced.
    """
    folder = directory / f"checkpoint_{step:04d}"
    with atomic_directory(folder, replace=True) as new:
        if policy.is_lora:
            # Embeddings are never adapted; leaving it to peft would make it ask the hub about the base model.
            policy.model.save_pretrained(str(new), save_embedding_layers=False)
        else:
            policy.model.save_pretrained(str(new))
        tokenizer.save_pretrained(new)
        content = {**metadata, "step": step, "base_model": policy.name, "is_lora": policy.is_lora}
        (new / "metadata.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sums = [f"{_sha256(file)}  {file.relative_to(new)}\n" for file in sorted(new.rglob("*")) if file.is_file()]
        (new / COMPLETE).write_text("".join(sums), encoding="utf-8")
    return folder


def latest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step; None where there is none. Incomplete ones are passed over."""
    complete = {
        int(match[1]): marker.parent
        for marker in directory.glob(f"checkpoint_*/{COMPLETE}")
        if (match := re.fullmatch(r"checkpoint_(\d{4,})", marker.parent.name))
    }
    return complete[max(complete)] if complete else None


def check_writable(directory: Path) -> None:
    """Makes the folder and writes to it, so that a run does not train for hours and then cannot save.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            Problem(
                "logging.checkpoint_dir",
                directory,
                f"models have to be saved there, and it cannot be written to ({error.strerror})",
                "give a folder that you may write to",
            )
        ) from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
