"""The model: how it is loaded for each of its roles, and what of it is trained.

`python -m expert_iteration.model NAME` finds a model and, where that takes a conversion, prepares the cache.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from expert_iteration.config.schema import ModelConfig, RunConfig
from expert_iteration.errors import EXIT_OK, EXIT_USER_ERROR, Problem, UserError
from expert_iteration.model_source import check_model, loading_error, local_files_only, resolve_model
from expert_iteration.seeding import derive_seed

ADAPTER = "default"
"""peft's name for the one adapter."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that is trained. Whatever is trained of it is float32."""

    name: str
    """As the user gave it."""
    model: PreTrainedModel | PeftModel
    compute_dtype: torch.dtype
    """What autocast computes in."""

    @property
    def is_lora(self) -> bool:
        return isinstance(self.model, PeftModel)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimizer moves: adapter weights with LoRA, else every weight."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def autocast(self) -> AbstractContextManager[None]:
        """Forward passes in it compute in `compute_dtype`."""
        return torch.autocast(
            self.model.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype != torch.float32
        )

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Forward passes in it are those of the model that training started from.

        Raises:
            ValueError: without LoRA there is no such model any more.
        """
        if not isinstance(self.model, PeftModel):
            raise ValueError("there is no adapter to switch off: the whole model is trained")
        return self.model.disable_adapter()

    @torch.no_grad()
    def merged_state(self) -> Iterator[tuple[str, Tensor]]:
        """Dense weights and persistent buffers under the names of the model without adapter; tied weights once.

        An adapted weight is a new float32 tensor W + scale * B A, so that nothing is rounded here and the base weights
        stay as they are. The other tensors are the model's own, valid until the next optimizer step.
        """
        if isinstance(self.model, PeftModel):
            yield from _merged_lora_state(self.model.get_base_model())
        else:
            yield from _state_once(self.model)


def _state_once(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; of tied parameters the first name."""
    persistent = model.state_dict().keys()
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _merged_lora_state(base_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    adapted: dict[str, Any] = {
        f"{name}.base_layer.weight": module
        for name, module in base_model.named_modules()
        if isinstance(module, LoraLayer)
    }
    for name, tensor in _state_once(base_model):
        if name in adapted:
            yield name.replace(".base_layer.", "."), _merged_weight(tensor, adapted[name])
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


def _merged_weight(base: Tensor, layer: Any) -> Tensor:
    """W + scale * B A in float32, in one pass over W; peft's get_delta_weight makes two tensors of its size first."""
    down, up, scale = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]
    if layer.fan_in_fan_out:  # Conv1D keeps its weight transposed
        return torch.addmm(base.float(), down.float().T, up.float().T, alpha=scale)
    return torch.addmm(base.float(), up.float(), down.float(), alpha=scale)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`float32`, `bfloat16`, or for `auto` bfloat16 where the hardware multiplies it natively and else float32.

    Native are CUDA from compute capability 8.0 on, and CPUs with AVX512_BF16 or AMX; elsewhere bfloat16 is emulated and
    slower than float32.
    """
    if name == "float32":
        return torch.float32
    elif name == "bfloat16":
        return torch.bfloat16
    elif name == "auto":
        return torch.bfloat16 if _has_native_bfloat16(device) else torch.float32
    else:
        raise ValueError(f"unknown dtype {name!r}")


def _has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    elif device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        return False


def load_policy(config: RunConfig, device: torch.device) -> Policy:
    """The model to train, on `device`.

    Full fine-tuning trains float32 weights. LoRA trains float32 adapters on all linear layers of a frozen base, whose
    weights are kept in the compute dtype when `train.mixed_precision` is on; the fresh adapter leaves the outputs as
    they are, and its initial values follow from the run's seed alone.

    Raises:
        UserError: the model cannot be loaded.
    """
    train_model = config.train_model
    compute_dtype = torch.float32
    if config.train.mixed_precision:
        compute_dtype = resolve_dtype(train_model.torch_dtype, device)
    weights_dtype = compute_dtype if train_model.lora.enabled else torch.float32
    model = _load(config.model, device, weights_dtype, train_model.attn_implementation)
    disable_dropout(model)
    if train_model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.model.compile:
        compile_layers(model)
    policy = _attach_lora(model, config) if train_model.lora.enabled else model
    return Policy(config.model.name, policy.train(), compute_dtype)


def check_compiler(config: ModelConfig) -> None:
    """Raises UserError when torch.compile is asked for on a CPU and its C++ compiler is not there."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if config.compile and not torch.cuda.is_available() and shutil.which(compiler) is None:
        raise UserError(
            Problem(
                "model.compile",
                True,
                f"needs a C++ compiler, and there is no {compiler} on this machine",
                "install one, name yours in the environment variable CXX, or write model.compile=false",
            )
        )


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles everything before the vocabulary projection, in place, for any batch size and length.

    Compilation happens at the first call. Names and weights stay as they are.
    """
    model.get_decoder().compile(dynamic=True)


def disable_dropout(model: nn.Module) -> None:
    """Switches off the model's own dropout; an adapter that is attached later keeps its own.

    With it, trainer, reference and engine would disagree on the log-probs of the same weights, and the KL would not be
    zero where nothing has been learned.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def load_inference_model(config: RunConfig, device: torch.device) -> PreTrainedModel:
    """The engine's own copy: frozen, in eval mode, in `inference_model.torch_dtype`.

    It uses the attention of the model that is trained, so that both compute the same log-probabilities.

    Raises:
        UserError: the model cannot be loaded.
    """
    dtype = resolve_dtype(config.inference_model.torch_dtype, device)
    return load_frozen(config.model, device, dtype, config.train_model.attn_implementation)


def load_reference_model(config: RunConfig, device: torch.device) -> PreTrainedModel:
    """The reference as a copy of its own: frozen, in eval mode, in `ref_model.torch_dtype`.

    Raises:
        UserError: the model cannot be loaded.
    """
    dtype = resolve_dtype(config.ref_model.torch_dtype, device)
    model = load_frozen(config.model, device, dtype, config.ref_model.attn_implementation)
    if config.model.compile:
        compile_layers(model)
    return model


def load_frozen(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    """A copy in eval mode, none of whose weights requires a gradient.

    Raises:
        UserError: the model cannot be loaded.
    """
    return _load(config, device, dtype, attn_implementation).eval().requires_grad_(False)


def _load(config: ModelConfig, device: torch.device, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    source = resolve_model(config.name)
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local_files_only(source),
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise loading_error(config.name, source, error) from error
    model, info = loaded
    if getattr(model, "peft_config", None):  # transformers attaches an adapter that lies in the hub's repository
        raise loading_error(config.name, source, ValueError("it comes with an adapter; merge it into the model first"))
    # transformers fills them with random values and goes on.
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"]))
        raise loading_error(config.name, source, ValueError(f"it lacks the weights {missing}"))
    return model.to(device)


def _attach_lora(model: PreTrainedModel, config: RunConfig) -> PeftModel:
    lora = config.train_model.lora
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "lora"))
        return get_peft_model(
            model,
            LoraConfig(
                r=lora.r,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by r, nothing else
                lora_dropout=lora.dropout,
                target_modules="all-linear",
                bias="none",
                task_type="CAUSAL_LM",
            ),
            adapter_name=ADAPTER,
        )


def main(arguments: list[str]) -> int:
    """Checks each model named and prints where it is."""
    for name in arguments:
        try:
            check_model(name)
            print(f"{name}: {resolve_model(name)}")
        except UserError as error:
            print(error, file=sys.stderr)
            return EXIT_USER_ERROR
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
