"""A reward model beside a task's own reward, or in its place: a sequence classification model with one output.

reward = task_weight * task reward + weight * transform(score of the conversation)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import jinja2
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from expert_iteration.config.schema import RewardModelConfig, RunConfig
from expert_iteration.errors import Problem, UserError
from expert_iteration.gguf import PACKAGE_PREFIX
from expert_iteration.model import resolve_dtype
from expert_iteration.model_source import loading_error, local_files_only, resolve_model
from expert_iteration.tasks.answers import strip_reasoning
from expert_iteration.types import Prompt, Score, Verifier

KEY = "reward_model.name"
NAME = "reward_model"
"""Of its part in the details of a score."""


class RewardModel:
    """Scores conversations in batches. Several threads may use it: they take turns.

    Args:
        model: a sequence classification model with one output, in eval mode.
        tokenizer: its own.
        batch_size: conversations per forward pass.
        max_length: most tokens of a conversation.
        device: where it computes.
        offload: whether it is kept on the CPU between uses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        max_length: int,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.max_length = max_length
        self._home = torch.device("cpu") if offload else device
        self._model = model.eval().requires_grad_(False).to(self._home)
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._device = device
        own_pad_id = model.config.get_text_config().pad_token_id
        self._own_pad_id = own_pad_id if own_pad_id is not None and own_pad_id >= 0 else None
        self._takes_token_types = "token_type_ids" in signature(model.forward).parameters
        self._lock = threading.Lock()
        """Of the model's place, on the device or offloaded, and of the padding id in its config."""

    def encode(self, prompt: Prompt, response: str) -> dict[str, list[int]]:
        """The model's inputs for one conversation: by the tokenizer's chat template, else prompt and response as a pair
        of texts. Reasoning is no part of the response.

        Raises:
            UserError: the template cannot render the messages.
        """
        answer = strip_reasoning(response)
        if self._tokenizer.chat_template is None:
            asked = "\n".join(message["content"] for message in prompt.messages)
            return dict(self._tokenizer(asked, answer, return_attention_mask=True))
        messages = [*(dict(message) for message in prompt.messages), {"role": "assistant", "content": answer}]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except (jinja2.TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            constraint = f"its chat template cannot render messages of the roles {roles} ({error})"
            way_out = "name a model that takes such prompts, or change the prompts"
            raise _error(self._tokenizer.name_or_path, constraint, way_out) from error
        # The template writes the special tokens.
        return dict(self._tokenizer(text, add_special_tokens=False, return_attention_mask=True))

    @torch.no_grad()
    def scores(self, encoded: Sequence[Mapping[str, list[int]]]) -> list[float]:
        """One score per encoded conversation, in order; the company of others does not change it but for rounding.

        Equal conversations are scored once, since by rounding a group of equal responses would no longer be tied. NaN
        for a conversation without tokens.
        """
        keys = [tuple(each["input_ids"]) for each in encoded]
        distinct = {key: each for key, each in zip(keys, encoded, strict=True) if key}
        order = sorted(distinct, key=len)
        found: dict[tuple[int, ...], float] = {(): math.nan}
        with self._lock:
            self._model.to(self._device)
            try:
                for start in range(0, len(order), self._batch_size):
                    batch = order[start : start + self._batch_size]
                    logits = self._logits([distinct[key] for key in batch])
                    found |= zip(batch, logits.tolist(), strict=True)
            finally:
                self._model.to(self._home)
        return [found[key] for key in keys]

    def _logits(self, encoded: Sequence[Mapping[str, list[int]]]) -> Tensor:
        """(B,) float32."""
        # Decoders pool at the last token that is not this one; without such an id they refuse batches.
        pad_id = self._own_pad_id
        if pad_id is None:
            pad_id = _absent_id(encoded, self._tokenizer.pad_token_id)
            self._model.config.get_text_config().pad_token_id = pad_id
            self._model.config.pad_token_id = pad_id
        fill = {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0}
        names = [name for name in fill if name in encoded[0] and (name != "token_type_ids" or self._takes_token_types)]
        inputs = {name: _padded([each[name] for each in encoded], fill[name]).to(self._device) for name in names}
        logits: Tensor = self._model(**inputs).logits  # (B, 1)
        return logits[:, 0].float()


class RewardModelVerifier:
    """Adds a reward model to what scores a task.

    A response that the task could not score stays unscored, unless `task_weight` is 0. `success` stays the task's.
    """

    def __init__(
        self, verifier: Verifier, reward_model: RewardModel, *, weight: float, task_weight: float, transform: str
    ) -> None:
        if transform not in ("none", "sigmoid"):
            raise ValueError(f"transform={transform!r}: one of none, sigmoid")
        self._verifier = verifier
        self._reward_model = reward_model
        self._weight = weight
        self._task_weight = task_weight
        self._transform = transform

    def score_many(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """One score per item, in order. `details` gains `task_reward` and `reward_model`, or why there is none."""
        scores = self._verifier.score_many(items)
        usable = [index for index, score in enumerate(scores) if score.reward is not None or self._task_weight == 0]
        encoded = {index: self._reward_model.encode(*items[index]) for index in usable}
        short = [index for index in usable if len(encoded[index]["input_ids"]) <= self._reward_model.max_length]
        raw = dict(zip(short, self._reward_model.scores([encoded[index] for index in short]), strict=True))
        return [self._combined(score, raw.get(index), is_usable=index in encoded) for index, score in enumerate(scores)]

    def close(self) -> None:
        """Closes the task's verifier."""
        self._verifier.close()

    def _combined(self, score: Score, raw: float | None, *, is_usable: bool) -> Score:
        details = dict(score.details)
        if score.reward is not None:
            details["task_reward"] = score.reward
        if not is_usable:
            return Score(None, details)
        if raw is None:
            return Score(None, details | {f"{NAME}.too_long": 1.0})
        if not math.isfinite(raw):
            return Score(None, details | {f"{NAME}.invalid": 1.0})
        value = raw if self._transform == "none" else _sigmoid(raw)
        task_part = self._task_weight * score.reward if score.reward is not None else 0.0
        return Score(task_part + self._weight * value, details | {NAME: value})


def check_reward_model(config: RunConfig) -> None:
    """Reads config and tokenizer of reward_model.name, if there is one; no weights.

    Raises:
        UserError: it cannot be found, or is no sequence classification model with one output; there is no such device.
    """
    name = config.reward_model.name
    if name is None:
        return
    _check_device(config.reward_model)
    if name.startswith(PACKAGE_PREFIX) or name.endswith(".gguf"):
        raise _error(name, "GGUF files hold language models, without an output layer that scores")
    source, trust = resolve_model(name, key=KEY), config.model.trust_remote_code
    if isinstance(source, Path) and (source / "adapter_config.json").exists():
        way_out = "merge it first (peft: merge_and_unload, then save_pretrained) and name the merged folder"
        raise _error(name, "the folder holds a LoRA adapter", way_out)
    try:
        found = AutoConfig.from_pretrained(source, trust_remote_code=trust, local_files_only=local_files_only(source))
        AutoTokenizer.from_pretrained(source, trust_remote_code=trust, local_files_only=local_files_only(source))
    except (OSError, ValueError) as error:
        raise loading_error(name, source, error, key=KEY) from error
    if not trust and type(found) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise _error(name, f"{found.model_type} has no sequence classification model")
    if found.num_labels != 1:
        raise _error(name, f"it has {found.num_labels} outputs, and a reward is one number")


def is_on_this_machine(device: torch.device) -> bool:
    """Whether there is such a device: the CPU, or a CUDA device of that number."""
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()


def _check_device(settings: RewardModelConfig) -> None:
    if settings.device is not None and not is_on_this_machine(torch.device(settings.device)):
        there = torch.cuda.device_count()
        way_out = f"write cuda:0 to cuda:{there - 1}, or cpu" if there else "write cpu, or null for the engine's device"
        constraint = f"this machine has {there} CUDA devices"
        raise UserError(Problem("reward_model.device", settings.device, constraint, way_out))


def with_reward_model(verifier: Verifier, config: RunConfig, default_device: torch.device) -> Verifier:
    """The verifier with the reward model of the config, or as it is where the config has none.

    Raises:
        UserError: the model cannot be loaded, its weights lack the output layer, its tokenizer is another model's, or
            it has fewer positions than reward_model.max_length.
    """
    settings = config.reward_model
    if settings.name is None:
        return verifier
    device = default_device if settings.device is None else torch.device(settings.device)
    model, tokenizer = _load(settings, device, trust_remote_code=config.model.trust_remote_code)
    _check_vocabulary(settings.name, model, tokenizer)
    reward_model = RewardModel(
        model,
        tokenizer,
        batch_size=settings.batch_size,
        max_length=_max_length(settings, model),
        device=device,
        offload=settings.offload,
    )
    return RewardModelVerifier(
        verifier,
        reward_model,
        weight=settings.weight,
        task_weight=settings.task_weight,
        transform=settings.transform,
    )


def _load(
    settings: RewardModelConfig, device: torch.device, *, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    name = settings.name
    assert name is not None
    source: Path | str = resolve_model(name, key=KEY)
    transformers_logging.disable_progress_bar()
    where: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local_files_only(source)}
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=resolve_dtype(settings.torch_dtype, device), output_loading_info=True, **where
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise loading_error(name, source, error, key=KEY) from error
    # transformers fills them with random values and goes on: a language model would give random rewards.
    if info["missing_keys"]:
        raise _error(name, f"its weights lack {', '.join(sorted(info['missing_keys']))}")
    return model, tokenizer


def _check_vocabulary(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    size, highest = model.config.get_text_config().vocab_size, max(tokenizer.get_vocab().values())
    if highest >= size:
        constraint = f"its tokenizer has ids up to {highest}, the model has embeddings for {size} ids"
        raise _error(name, constraint, "save the tokenizer that belongs to the model beside it")


def _max_length(settings: RewardModelConfig, model: PreTrainedModel) -> int:
    """reward_model.max_length, or as many as the model has positions for."""
    positions, key = _num_positions(model), "reward_model.max_length"
    if settings.max_length is None and positions is None:
        constraint = f"the config of {settings.name} does not say how many positions it has"
        raise UserError(Problem(key, "null", constraint, "give the most tokens of a conversation"))
    elif settings.max_length is None:
        assert positions is not None
        return positions
    elif positions is not None and settings.max_length > positions:
        constraint = f"{settings.name} has positions for {positions} tokens"
        raise UserError(Problem(key, settings.max_length, constraint, f"write at most {positions}, or null"))
    else:
        return settings.max_length


def _num_positions(model: PreTrainedModel) -> int | None:
    """Most tokens that the model has positions for; None where its config does not say."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            # RoBERTa and its kin number the positions from padding_idx + 1 on.
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return positions


def _absent_id(encoded: Sequence[Mapping[str, list[int]]], pad_id: int | None) -> int:
    """An id to pad with that stands in none of the conversations: the tokenizer's own, if it may."""
    present = {token for each in encoded for token in each["input_ids"]}
    candidates: Iterator[int] = (token for token in range(len(present) + 1) if token not in present)
    return pad_id if pad_id is not None and pad_id not in present else next(candidates)


def _padded(rows: Sequence[list[int]], value: int) -> Tensor:
    """(B, T) int64, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _error(
    name: str, constraint: str, way_out: str = "name a sequence classification model that gives one number"
) -> UserError:
    return UserError(Problem(KEY, name, constraint, way_out))
