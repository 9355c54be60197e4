"""What a config will do on this machine, before anything is loaded: numbers, devices, memory.

Memory follows from the config and from the sizes in the model's own config, never from free memory or time, so that the
same command has the same sequences in flight wherever it runs in the same dtype.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from expert_iteration.config import derived
from expert_iteration.config.advice import advice
from expert_iteration.config.schema import RunConfig
from expert_iteration.engines.slots import SlotPlan, plan_slots
from expert_iteration.errors import Problem, UserError
from expert_iteration.gguf import PACKAGE_PREFIX, package_gguf
from expert_iteration.model import resolve_dtype
from expert_iteration.optim import reference_needed
from expert_iteration.reward_model import is_on_this_machine
from expert_iteration.runtime.backend import backend

GIB = 2**30
PROMPT_TOKENS = 512
"""Allowance for the prompt of a sequence, in tokens."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Devices of each role, one entry for each device asked for; equal entries are shared."""

    train: tuple[torch.device, ...]
    inference: tuple[torch.device, ...]
    reference: tuple[torch.device, ...]


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose, over all devices. Activations and the logits of a micro-batch come on top."""

    num_parameters: int
    num_trained: int
    trained_model: int
    gradients: int
    optimizer: int
    engine: int
    kv_cache: int
    reference: int
    reward_model: int | None
    """None where there is none, or where it or its device is not on this machine."""

    @property
    def total(self) -> int:
        policy = self.trained_model + self.gradients + self.optimizer + self.engine + self.kv_cache + self.reference
        return policy + (self.reward_model or 0)


def device_plan(config: RunConfig, num_gpus: int) -> DevicePlan:
    """Devices from cuda:0 on, in turn: first to training, then to generation, then to the reference.

    The count starts again where the GPUs end. Without GPUs a device is a slot in this process, of which there is one.
    """
    asked = (config.train_model.num_devices, config.inference_model.num_devices, config.ref_model.num_devices)
    names = [f"cuda:{index}" for index in range(num_gpus)] or ["cpu"]
    devices = [torch.device(names[index % len(names)]) for index in range(sum(asked))]
    train, inference, _ = asked
    return DevicePlan(
        tuple(devices[:train]), tuple(devices[train : train + inference]), tuple(devices[train + inference :])
    )


def load_model_config(config: RunConfig) -> Any:
    """transformers' config of model.name, from this machine alone.

    Raises:
        OSError: the model is neither a folder nor in the hub's cache.
        UserError: package:NAME is not installed.
        ValueError: transformers does not know the architecture.
    """
    name, trust = config.model.name, config.model.trust_remote_code
    file = package_gguf(name) if name.startswith(PACKAGE_PREFIX) else Path(name)
    if file.suffix == ".gguf":
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=trust)


def kv_bytes_per_token(model_config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token over all layers: 2 x layers x key-value heads x head size x bytes of the dtype."""
    heads = getattr(model_config, "num_key_value_heads", None) or model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    return 2 * model_config.num_hidden_layers * heads * head_dim * dtype.itemsize


def sequences_in_flight(config: RunConfig, model_config: Any) -> int:
    """Sequences that the in-process engine generates at a time, with PROMPT_TOKENS for each prompt.

    Raises:
        UserError: the cache does not hold one sequence.
    """
    check_cache(config, model_config)
    return config.env.num_envs or _slots(config, model_config).samples


def check_cache(config: RunConfig, model_config: Any) -> None:
    """Raises UserError when inference_model.kv_cache_gib bounds the sequences and does not hold one of them."""
    budget = max_cached_tokens(config, model_config)
    needed = PROMPT_TOKENS + config.inference_model.max_tokens
    if budget is not None and budget < needed:
        size = needed * _kv_bytes_per_token(config, model_config) / GIB
        raise UserError(
            Problem(
                "inference_model.kv_cache_gib",
                config.inference_model.kv_cache_gib,
                f"does not hold one sequence of {PROMPT_TOKENS} prompt and inference_model.max_tokens="
                f"{config.inference_model.max_tokens} response tokens, {size:.3g} GiB",
                f"write at least {size:.3g}, lower inference_model.max_tokens, or give env.num_envs",
            )
        )


def max_cached_tokens(config: RunConfig, model_config: Any) -> int | None:
    """Tokens whose keys and values inference_model.kv_cache_gib holds; None where env.num_envs is the bound."""
    if config.env.num_envs is not None:
        return None
    return int(config.inference_model.kv_cache_gib * GIB // _kv_bytes_per_token(config, model_config))


def _kv_bytes_per_token(config: RunConfig, model_config: Any) -> int:
    device = device_plan(config, torch.cuda.device_count()).inference[0]
    return kv_bytes_per_token(model_config, resolve_dtype(config.inference_model.torch_dtype, device))


def _slots(config: RunConfig, model_config: Any) -> SlotPlan:
    """What the engine holds at a time in a collection whose longest prompt has PROMPT_TOKENS."""
    return plan_slots(
        PROMPT_TOKENS,
        derived.prompts_per_collection(config),
        derived.dialog_turns_per_batch(config),
        config.inference_model.max_tokens,
        max_sequences=config.env.num_envs,
        max_cached_tokens=max_cached_tokens(config, model_config),
    )


def estimate_memory(config: RunConfig, model_config: Any) -> MemoryEstimate:
    """Bytes that weights, gradients, optimizer state and cache take; parameters are counted on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.model.trust_remote_code)
    count = sum(parameter.numel() for parameter in model.parameters())
    lora = config.train_model.lora
    adapter = lora.r * sum(
        sum(module.weight.shape)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not model.get_output_embeddings()
    )
    trained = adapter if lora.enabled else count
    float32, plan = torch.float32.itemsize, device_plan(config, torch.cuda.device_count())
    frozen_base = lora.enabled and config.train.mixed_precision
    base = resolve_dtype(config.train_model.torch_dtype, plan.train[0]) if frozen_base else torch.float32
    inference = resolve_dtype(config.inference_model.torch_dtype, plan.inference[0])
    reference = resolve_dtype(config.ref_model.torch_dtype, plan.reference[0])
    return MemoryEstimate(
        num_parameters=count,
        num_trained=trained,
        trained_model=base.itemsize * count + (float32 * adapter if lora.enabled else 0),
        gradients=float32 * trained,
        optimizer=2 * float32 * trained,
        engine=inference.itemsize * count,
        kv_cache=_kv_cache_bytes(config, model_config),
        reference=reference.itemsize * count if _reference_needed(config) and not lora.enabled else 0,
        reward_model=_reward_model_bytes(config),
    )


def _reward_model_bytes(config: RunConfig) -> int | None:
    name, trust = config.reward_model.name, config.model.trust_remote_code
    device = _reward_model_device(config, torch.cuda.device_count())
    if name is None or not is_on_this_machine(device):
        return None
    try:
        model_config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(model_config, trust_remote_code=trust)
    except (OSError, ValueError):
        return None
    return resolve_dtype(config.reward_model.torch_dtype, device).itemsize * sum(
        parameter.numel() for parameter in model.parameters()
    )


def _reward_model_device(config: RunConfig, num_gpus: int) -> torch.device:
    device = config.reward_model.device
    return device_plan(config, num_gpus).inference[0] if device is None else torch.device(device)


def _kv_cache_bytes(config: RunConfig, model_config: Any) -> int:
    if config.env.num_envs is not None:
        return _slots(config, model_config).cached_tokens * _kv_bytes_per_token(config, model_config)
    return int(config.inference_model.kv_cache_gib * GIB)


def render_plan(config: RunConfig) -> str:
    """The resolved config, the numbers that follow from it, the devices, a memory estimate and advice, as text.

    A model that is not on this machine is no error: what needs its sizes is then left out, with the reason.

    Raises:
        UserError: the cache does not hold one sequence.
    """
    try:
        model_config = load_model_config(config)
    except (OSError, UserError, ValueError) as error:
        reason = "it is not on this machine" if isinstance(error, OSError) else str(error).splitlines()[0]
        sequences = str(config.env.num_envs or "not known without the model's sizes")
        memory = [f"not estimated: {config.model.name} cannot be read: {reason}"]
    else:
        if backend(config) == "vllm":
            sequences = f"{config.env.num_envs or 'as many as its cache holds'}, in each replica"
        else:
            sequences = str(sequences_in_flight(config, model_config))
        memory = _memory_lines(config, estimate_memory(config, model_config))
    parts = [
        ("Config", OmegaConf.to_yaml(OmegaConf.create(asdict(config))).splitlines()),
        ("Run", _run_lines(config, sequences)),
        ("Devices", _device_lines(config, torch.cuda.device_count())),
        ("Memory", memory),
        ("Advice", advice(config)),
    ]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts if lines)


def _run_lines(config: RunConfig, sequences: str) -> list[str]:
    turns, collections = derived.dialog_turns_per_batch(config), derived.num_collections(config)
    optimizer_batch = config.train.optim_batch_size * derived.micro_batches_per_step(config)
    lines = [
        f"collections               {collections} of {turns} completions, {collections * turns} in all",
        f"prompts per collection    {derived.prompts_per_collection(config)}, {config.env.repeats} completions each",
        f"kept per collection       at most {derived.max_kept_per_collection(config)}",
        f"replay buffer             {derived.buffer_size(config)} samples",
        f"optimizer batch           {optimizer_batch} samples",
        f"optimizer steps           at most {derived.total_planned_steps(config)}, the length of both schedules",
        f"sequences in flight       {sequences}",
    ]
    if config.loop == "async":
        in_flight, waiting = derived.collections_in_flight(config), derived.queue_size(config)
        lines.append(
            f"in the background         {in_flight} collections at a time, at most {waiting} finished ones wait"
        )
    if config.env.expert_data is not None:
        most = f"at most {derived.max_expert_per_group(config)} of the {config.train.topk_size} kept of a group"
        lines.append(f"expert data               {most}, from {config.env.expert_data}")
    return lines


def _device_lines(config: RunConfig, num_gpus: int) -> list[str]:
    plan = device_plan(config, num_gpus)
    roles = [("train_model", plan.train), ("inference_model", plan.inference), ("ref_model", plan.reference)]
    used = [device for _, devices in roles for device in devices]
    lines = []
    for role, devices in roles:
        different = dict.fromkeys(devices)
        asked = f"{len(devices)} asked, " if len(devices) > len(different) else ""
        shares = " (shares)" if any(used.count(device) > 1 for device in different) else ""
        where = f"uses {devices[0]}" if num_gpus else "1 process slot on cpu"
        lines.append(f"{role:<26}{asked}{where}{shares}{_replicas(config) if role == 'inference_model' else ''}")
    if config.reward_model.name is not None:
        between = ", on the CPU between uses" if config.reward_model.offload else ""
        lines.append(f"{'reward_model':<26}uses {_reward_model_device(config, num_gpus)}{between}")
    return lines


def _replicas(config: RunConfig) -> str:
    if backend(config) == "local":
        return ", in the process that trains"
    size = config.inference_model.tensor_parallel_size
    number = config.inference_model.num_devices // size
    return f", {number} vLLM {'replica' if number == 1 else 'replicas'} of {size} as Ray actors"


def _memory_lines(config: RunConfig, estimate: MemoryEstimate) -> list[str]:
    rows = [
        ("trained model", estimate.trained_model, f"{estimate.num_parameters:,} parameters"),
        ("gradients", estimate.gradients, f"{estimate.num_trained:,} trained parameters, float32"),
        ("AdamW", estimate.optimizer, "two moments each, float32"),
        ("engine", estimate.engine, f"inference_model.torch_dtype={config.inference_model.torch_dtype}"),
        ("keys and values", estimate.kv_cache, _kv_cache_note(config)),
        ("reference", estimate.reference, _reference_note(config)),
        *_reward_model_rows(config, estimate),
        ("total", estimate.total, "activations come on top"),
    ]
    return [f"{name:<20}{size / GIB:>9.2f} GiB   {note}" for name, size, note in rows]


def _reward_model_rows(config: RunConfig, estimate: MemoryEstimate) -> list[tuple[str, int, str]]:
    if config.reward_model.name is None:
        return []
    elif estimate.reward_model is None:
        return [("reward model", 0, f"not counted: {config.reward_model.name} or its device is not on this machine")]
    else:
        return [("reward model", estimate.reward_model, f"reward_model.torch_dtype={config.reward_model.torch_dtype}")]


def _kv_cache_note(config: RunConfig) -> str:
    if config.env.num_envs is not None:
        return f"env.num_envs sequences, prompts of {PROMPT_TOKENS} tokens"
    return "inference_model.kv_cache_gib"


def _reference_needed(config: RunConfig) -> bool:
    train = config.train
    return reference_needed(train.loss_function, train.kl_to_ref_coeff, train.kl_to_ref_schedule)


def _reference_note(config: RunConfig) -> str:
    if not _reference_needed(config):
        return "none: nothing reads it"
    elif config.train_model.lora.enabled:
        return "none: the trained model with its adapter off"
    else:
        return f"ref_model.torch_dtype={config.ref_model.torch_dtype}"
