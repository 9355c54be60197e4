"""Checkpoints: folders that transformers or peft load and from which a run goes on, complete or not there.

checkpoint_NNNN/
    model.safetensors, config.json, ...   the policy; with LoRA the adapter
    tokenizer.json, ...
    metadata.json                         step, config, versions of the stack: JSON, to be read without torch
    state.pt                              optimizer, buffer, prompts, random state, counters
    engine.safetensors                    what the engine holds, where that is older than the policy
    COMPLETE                              SHA-256 sums of all others
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from expert_iteration.atomic import atomic_directory
from expert_iteration.checkpoint_files import COMPLETE, METADATA, latest, prune, sha256
from expert_iteration.engines.checksum import deduplicated_state
from expert_iteration.errors import ComponentError, Problem, UserError
from expert_iteration.model import Policy

__all__ = [
    "CheckpointWriter",
    "Snapshot",
    "check_writable",
    "latest",
    "load_engine_weights",
    "load_policy",
    "load_state",
]

STATE = "state.pt"
ENGINE = "engine.safetensors"
ADAPTER = "adapter_model.safetensors"


class Snapshot:
    """A checkpoint in memory: one copy of everything, which training no longer touches.

    Args:
        policy: its trained weights are copied.
        tokenizer: with its chat template.
        step: optimizer steps so far.
        metadata: plain JSON.
        state: what the run goes on from, in plain types and tensors.
        engine_weights: what the engine holds, where that is not the policy.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        step: int,
        metadata: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        engine_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.step = step
        self._policy = policy
        self._tokenizer = tokenizer
        self._weights = _copied(_trained_weights(policy))
        self._metadata = {**metadata, "step": step, "base_model": policy.name, "is_lora": policy.is_lora}
        self._state = copy.deepcopy(state)
        self._engine_weights = None if engine_weights is None else _copied(engine_weights)

    def write(self, directory: Path) -> Path:
        """Writes `directory`/checkpoint_NNNN and returns it. It appears at once, complete and on disk; one of the same
        name is replaced.

        Raises:
            OSError: it could not be written; what was there before is untouched.
        """
        folder = directory / f"checkpoint_{self.step:04d}"
        with atomic_directory(folder, replace=True) as new:
            model: Any = self._policy.model
            # Embeddings are never adapted; leaving it to peft would make it ask the hub about the base model.
            options = {"save_embedding_layers": False} if self._policy.is_lora else {}
            model.save_pretrained(str(new), state_dict=self._weights, **options)
            self._tokenizer.save_pretrained(new)
            (new / METADATA).write_text(json.dumps(self._metadata, indent=2) + "\n", encoding="utf-8")
            if self._state is not None:
                torch.save(self._state, new / STATE)
            if self._engine_weights is not None:
                save_file(self._engine_weights, new / ENGINE)
            sums = [f"{sha256(file)}  {file.relative_to(new)}\n" for file in sorted(new.rglob("*")) if file.is_file()]
            (new / COMPLETE).write_text("".join(sums), encoding="utf-8")
        return folder


class CheckpointWriter:
    """Writes snapshots in a thread of its own, one at a time, while the run goes on.

    A save that fails is told and the run goes on: the last good checkpoint stays. When the run ends, a last save that
    failed is an error.

    Args:
        directory: gets the checkpoints.
        keep_last: as many stay; None keeps all.
        keep_best: the one with the highest score in its metadata stays as well.
        tell: takes a line for the user.
    """

    def __init__(self, directory: Path, *, keep_last: int | None, keep_best: bool, tell: Callable[[str], None]) -> None:
        self.directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._tell = tell
        self._thread: Thread | None = None
        self._failure: Exception | None = None
        """Of the last save."""
        self.longest_s = 0.0
        """Seconds of the save that took longest."""

    def submit(self, snapshot: Snapshot) -> None:
        """Has it written; waits for the one before."""
        self._join()
        self._thread = Thread(target=self._write, args=(snapshot,), name="checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            ComponentError: the last save failed.
        """
        self._join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise ComponentError(f"the last checkpoint could not be saved: {failure}") from failure

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot) -> None:
        start = perf_counter()
        try:
            folder = snapshot.write(self.directory)
            self._failure = None
            self.longest_s = max(self.longest_s, perf_counter() - start)
            self._tell(f"Saved: {folder}")
            prune(self.directory, self._keep_last, self._keep_best)
        except Exception as error:  # a full disk is an error of its own kind to each library that writes
            self._failure = error
            good = latest(self.directory)
            self._tell(
                f"The checkpoint of step {snapshot.step} could not be saved ({error}). "
                + ("There is none before it." if good is None else f"The last good one is {good}.")
            )


def load_policy(policy: Policy, folder: Path) -> None:
    """Gives the policy the weights of a checkpoint, bit for bit.

    Raises:
        ComponentError: weights of an adapter are missing or do not belong to the model.
    """
    model: Any = policy.model
    if policy.is_lora:
        outcome: Any = set_peft_model_state_dict(model, load_file(folder / ADAPTER))
        wrong = [*outcome.unexpected_keys, *(name for name in outcome.missing_keys if "lora_" in name)]
        if wrong:
            raise ComponentError(f"the adapter in {folder} does not fit the model: {', '.join(wrong)}")
    else:
        # transformers may save under other names than it computes with, and knows the way back.
        saved = type(model).from_pretrained(folder, dtype=torch.float32)
        model.load_state_dict(saved.state_dict())


def load_state(folder: Path) -> dict[str, Any]:
    """What a run goes on from.

    Raises:
        ComponentError: the checkpoint holds weights alone.
    """
    if not (folder / STATE).is_file():
        raise ComponentError(f"{folder} holds no {STATE}: a model was saved there, and nothing to go on from")
    state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return state


def load_engine_weights(folder: Path) -> dict[str, Tensor] | None:
    """What the engine held; None where that was the policy."""
    return load_file(folder / ENGINE) if (folder / ENGINE).is_file() else None


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


def _trained_weights(policy: Policy) -> dict[str, Tensor]:
    """Adapters, or all weights, tied ones once; under the model's own names."""
    if policy.is_lora:
        trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in policy.model.state_dict().items() if name in trained}
    return deduplicated_state(policy.model)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
