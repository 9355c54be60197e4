"""Schema of every key: type, meaning and range. Values live in the YAML files under config/, none here.

A key that may stay blank has the type `X | None`; its help says what blank stands for. Checks that look at one key
use the constraints below; checks across keys are in cross_checks.py; numbers that follow from keys are in derived.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def key(help: str, **constraints: Any) -> Any:
    """A field that has to be given in YAML.

    Constraints: `ge`, `gt`, `le`, `lt` bound a number; `choices` lists the values that a string may take.
    """
    return field(default=MISSING, metadata={"help": help, **constraints})


@dataclass
class EnvConfig:
    """What is asked and how it is rewarded."""

    dataset: str = key("Task.", choices=("reasoning_gym", "countdown", "gsm8k", "math", "ifeval", "custom"))
    data_path: str | None = key(
        "Folder or file with the data; blank loads the data set by name (gsm8k, math, ifeval) or generates it "
        "(reasoning_gym, countdown)."
    )
    options: dict[str, Any] = key(
        "Options of the task. reasoning_gym: `generator` (its name) and the generator's own options, or `generators`, "
        "a list of such entries, each with a `weight`. countdown: the options of the generator of that name. "
        "gsm8k, math: `length_limit`, in characters. ifeval: `semantics`, repaired (default) or reference. "
        "custom: `reward` (package.module:function) and those that the task's page lists."
    )
    prompt_template: str | None = key(
        "Text of the user message, with {question} in it; blank is the task's own. Double other braces."
    )
    reward: str = key(
        "exact: 1 or 0. graded: part marks for near misses as well (the task's page says how).",
        choices=("exact", "graded"),
    )
    reward_weights: dict[str, Any] = key(
        "Weights of the graded reward's components, such as {length: 0.2}; what is left out keeps its own. gsm8k and "
        "math: correct, format, closeness, length. ifeval: prompt_strict, prompt_loose, instruction_strict, "
        "instruction_loose."
    )
    invalid_rows: str = key(
        "error: a row that cannot be used, or whose gold answer does not score the maximum, stops the run. "
        "drop: it is left out, counted and named in the log.",
        choices=("error", "drop"),
    )
    train_size: int | None = key("Training rows; blank is all rows, and 10000 where rows are generated.", ge=1)
    test_size: int | None = key("Held-out rows; blank is all rows, and 500 where rows are generated.", ge=1)
    num_envs: int | None = key(
        "Sequences generated at a time; blank follows from inference_model.kv_cache_gib and the model's sizes.", ge=1
    )
    repeats: int = key("Samples per prompt (N).", ge=1)
    expert_data: str | None = key(
        "JSON Lines or Parquet file of responses that people or other models wrote to training prompts; they enter the "
        "groups. Blank is none."
    )
    expert_share: float = key("Most of topk_size that may come from expert_data, rounded down.", gt=0, le=1)
    verifier_workers: int | None = key(
        "Processes that score; 0 scores in the main process, without a time limit. "
        "Blank is 0 for gsm8k, countdown and reasoning_gym (2 for its generators with slow scorers), "
        "2 for the others.",
        ge=0,
    )
    verifier_time_limit_s: float = key("Most seconds for scoring one completion; above it is unscored.", gt=0)


@dataclass
class ModelConfig:
    """The model that all three roles start from."""

    name: str = key("Hub name, folder, .gguf file, or package:NAME for a Python package that carries a .gguf file.")
    chat_template: str | None = key(
        "Jinja chat template, or a path of a file that holds one; blank is the tokenizer's own. "
        "`plain` puts the messages' text one after another, for base models."
    )
    trust_remote_code: bool = key("Run Python code that comes with the model.")
    compile: bool = key(
        "Compile the layers with torch.compile where tokens are trained and the reference is computed. The first steps "
        "take a minute or more; on a CPU it needs a C++ compiler."
    )


DTYPES = ("auto", "float32", "bfloat16")
ATTENTION = ("sdpa", "eager")


@dataclass
class RewardModelConfig:
    """A model that scores completions too. `reward_model=NAME` is short for `reward_model.name=NAME`."""

    name: str | None = key("Sequence classification model with one output: hub name or folder. Blank is none.")
    weight: float = key("Weight of its score in the reward.")
    task_weight: float = key("Weight of the task's own reward beside it; 0 trains on the reward model alone.", ge=0)
    transform: str = key(
        "sigmoid: the score between 0 and 1. none: as it is, without bounds.", choices=("none", "sigmoid")
    )
    batch_size: int = key("Conversations per forward pass.", ge=1)
    max_length: int | None = key(
        "Most tokens of prompt and response, above which a completion is unscored; blank is all that the model has "
        "positions for.",
        ge=1,
    )
    torch_dtype: str = key("Type of its weights; auto as in train_model.", choices=DTYPES)
    device: str | None = key("Where it computes, such as cuda:1; blank is the engine's device.")
    offload: bool = key("Keep it in main memory between uses.")


@dataclass
class SelectionConfig:
    """Which of a group's completions are kept."""

    strategy: str = key(
        "topk: the best of them. random: as many as topk would take, from the same groups, whatever their reward.",
        choices=("topk", "random"),
    )
    above: str = key("A completion has to score above this statistic of its group.", choices=("mean", "median", "none"))
    min_reward: float | None = key("A completion has to score at least this; blank is no bound.")
    include_truncated: bool = key("Whether completions cut by max_tokens may be selected.")


@dataclass
class KLScheduleConfig:
    """How kl_to_ref_coeff moves over the run."""

    type: str = key("Form.", choices=("constant", "linear", "cosine"))
    end_value: float | None = key("Coefficient at the end; blank with constant, needed otherwise.", ge=0)


@dataclass
class TrainConfig:
    """The loop, the buffer and the loss."""

    exp_name: str = key("Name of the project that runs belong to (the wandb project).")
    mixed_precision: bool = key(
        "Compute in train_model.torch_dtype by autocast; trained weights stay float32 either way."
    )
    topk_size: int = key("Most completions kept per prompt (k).", ge=1)
    total_dialog_turns: int = key("Completions to collect in the whole run.", ge=1)
    dialog_turns_per_batch: int | None = key("Completions per collection; blank is 256.", ge=1)
    buffer_size: int | None = key("Samples that the replay buffer holds; blank is one collection's most.", ge=1)
    empty_replay_buffer: bool = key("Empty the buffer before each collection is stored.")
    prioritized_sampling: bool = key("Draw samples with higher rewards more often, with replacement.")
    prioritized_sampling_alpha: float = key("Exponent of the priority (reward - minimum + epsilon)^alpha.", ge=0)
    prioritized_sampling_beta: float = key(
        "0 keeps the preference; 1 cancels it in expectation by importance weights.", ge=0, le=1
    )
    prioritized_sampling_epsilon: float = key("Keeps the priority of the lowest reward above zero.", gt=0)
    epochs: int = key("Passes over the buffer per collection.", ge=1)
    optim_batch_size: int = key("Samples per micro-batch and device.", ge=1)
    packing: bool = key(
        "Several sequences in a row of a batch, and a prompt that several share once, where the model takes a mask for "
        "each query (SDPA without sliding windows). The result is the same but for rounding."
    )
    shuffle: str = key(
        "What an epoch puts into random order. samples: every sample. groups: prompts, whose samples stay next to each "
        "other, so that packing computes each prompt once.",
        choices=("samples", "groups"),
    )
    gradient_accumulation_steps: int = key("Micro-batches per optimizer step and device.", ge=1)
    weight_update_frequency: int | None = key(
        "Optimizer steps between publishes; blank is after each collection. With mode=async and a number, steps draw "
        "from the buffer as samples come in.",
        ge=1,
    )
    sync_iter: bool = key("false collects the next batch while training, at most one publish stale.")
    max_policy_age: int | None = key("Oldest sample to train on, in publishes; blank is no bound.", ge=0)
    stale_samples: str = key(
        "mode=async: what becomes of a collection that is older than max_policy_age when its turn comes. reissue asks "
        "its prompts again, once.",
        choices=("drop", "reissue"),
    )
    collections_in_flight: int | None = key("mode=async: collections made at a time; blank is 1.", ge=1)
    queue_size: int | None = key(
        "mode=async: finished collections that wait for the trainer; blank is as many as it consumes between two "
        "publishes.",
        ge=1,
    )
    max_wait_s: float = key("mode=async: longest wait for a collection, or of a publish for the engine.", gt=0)
    max_empty_collections: int = key("Collections in a row that may select nothing before the run stops.", ge=1)
    max_skipped_steps: int = key(
        "Optimizer steps in a row that may be skipped because loss or gradient is not finite; one more ends the run.",
        ge=0,
    )
    loss_function: str = key("Main term.", choices=("sft", "minor_sft"))
    minor_sft_beta: float = key("Temperature of minor_sft.", gt=0)
    loss_normalization: str = key(
        "sequence: mean of each sequence's mean. token: mean over all response tokens.", choices=("sequence", "token")
    )
    kl_to_ref_coeff: float = key("Weight of the KL to the reference at the start; 0 is off.", ge=0)
    kl_to_ref_schedule: KLScheduleConfig = field(default_factory=KLScheduleConfig)
    checkpoint_frequency: int | None = key(
        "Optimizer steps between checkpoints; blank saves at the end only, and where a run is cut short.", ge=1
    )
    keep_checkpoints: int | None = key("Newest checkpoints that stay; blank keeps all.", ge=1)
    keep_best: bool = key("Also keeps the checkpoint whose last collection had the highest mean reward.")
    max_time: float | None = key(
        "Seconds after the start of the program by which it has saved and ended, with status 124; blank is no limit.",
        gt=0,
    )
    logging_frequency: int = key("Optimizer steps between lines on the terminal and in wandb.", ge=1)


@dataclass
class LoraConfig:
    """Low-rank adapters on all linear layers."""

    enabled: bool = key("Train adapters instead of the whole model.")
    r: int = key("Rank.", ge=1)
    alpha: float = key("Scale: the adapter's output is multiplied by alpha / r.", gt=0)
    dropout: float = key("Dropout on the adapter's input.", ge=0, lt=1)


@dataclass
class TrainModelConfig:
    """The policy that is trained."""

    num_devices: int = key("Data-parallel shards.", ge=1)
    torch_dtype: str = key(
        "Type that the forward pass computes in; auto is bfloat16 where the hardware multiplies it natively.",
        choices=DTYPES,
    )
    attn_implementation: str = key("Attention of transformers.", choices=ATTENTION)
    gradient_checkpointing: bool = key("Recompute activations in the backward pass: less memory, about a third slower.")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class InferenceModelConfig:
    """The engine's copy of the policy."""

    backend: str = key(
        "local: in the process that trains. vllm: vLLM replicas as Ray actors. auto: vllm where there is a CUDA GPU "
        "and vLLM is installed, else local.",
        choices=("auto", "local", "vllm"),
    )
    num_devices: int = key(
        "vllm: replicas times tensor_parallel_size; without GPUs they share the cores. local: runs on the first.", ge=1
    )
    tensor_parallel_size: int = key("vllm: GPUs that share the weights of one replica.", ge=1)
    gpu_memory_utilization: float = key(
        "vllm: share of a GPU's memory for weights and cache; on a CPU kv_cache_gib counts.", gt=0, le=1
    )
    enforce_eager: bool = key("vllm: no compiled graphs: slower, starts in a third of the time.")
    quantization: str | None = key("vllm: method that its weights are quantized by as they load, such as fp8.")
    weight_folder: str | None = key(
        "vllm: folder through which weights are published, on a disk that all hosts share; blank is shared memory of "
        "this host."
    )
    canary_tolerance: float | None = key(
        "vllm: largest mean difference of trainer's and engine's log-probs after a publish, in nats per token; blank "
        "is 0.005 in float32, 0.05 in bfloat16 and 0.5 quantized.",
        gt=0,
    )
    max_restarts: int = key("vllm: how often replicas that die or hang may be started again in a run.", ge=0)
    time_limit_s: float = key("vllm: longest wait for one call of a replica, in seconds.", gt=0)
    torch_dtype: str = key("Type of weights and cache; auto as in train_model.", choices=DTYPES)
    kv_cache_gib: float = key("Memory for keys and values, in GiB; bounds the sequences in flight.", gt=0)
    temperature: float = key("Sampling temperature in training.", gt=0)
    top_p: float = key("Nucleus sampling; 1 is off.", gt=0, le=1)
    top_k: int = key("Draw from the k likeliest tokens; 0 is off.", ge=0)
    min_p: float = key("Least probability relative to the likeliest token; 0 is off.", ge=0, lt=1)
    max_tokens: int = key("Most tokens of a response, the end token included.", ge=1)
    include_stop_str_in_output: bool = key("Whether the text that is scored shows the end token.")


@dataclass
class RayConfig:
    """The cluster, where actors are used."""

    init_config: dict[str, Any] = key("Arguments of ray.init; empty is a cluster of the run's own on this host.")


@dataclass
class RefModelConfig:
    """The frozen model that the KL is measured to. With LoRA it is the trained model with its adapter off."""

    num_devices: int = key("Devices; this version runs on the first.", ge=1)
    torch_dtype: str = key("Type of its weights; auto as in train_model.", choices=DTYPES)
    attn_implementation: str = key("Attention of transformers.", choices=ATTENTION)


@dataclass
class SchedulerConfig:
    """Learning rate over the run."""

    enabled: bool = key("false keeps the rate constant.")
    type: str = key("Form after the warm-up.", choices=("cosine", "linear", "constant"))
    warmup_steps: int = key("Optimizer steps of linear warm-up.", ge=0)
    num_cycles: float = key("Cosine waves; 0.5 goes down to zero once.", gt=0)


@dataclass
class OptimizerConfig:
    """How weights are moved."""

    name: str = key("Optimizer.", choices=("adamw",))
    lr: float = key("Peak learning rate.", gt=0)
    weight_decay: float = key("Decoupled weight decay.", ge=0)
    clip_grad_norm: float | None = key("Largest global gradient norm; blank is no clipping.", gt=0)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass
class EvalConfig:
    """Greedy evaluation on held-out problems."""

    at_start: bool = key("Evaluate before the first collection.")
    at_end: bool = key("Evaluate after the last step.")
    num_prompts: int | None = key("Held-out problems; blank is all.", ge=1)
    num_transcripts: int = key("Responses shown side by side, before and after.", ge=0)


@dataclass
class LoggingConfig:
    """Where things are written."""

    experiment_name: str | None = key("Name of the run; blank is made from task and model.")
    checkpoint_dir: str | None = key("Folder for saved models; blank is checkpoints/ in the run's folder.")
    data_logger: str | None = key(
        "Class package.module:Name, below RemoteDataLogger, that makes the metrics of what the collector gives; blank "
        "is RemoteDataLogger."
    )
    wandb: str = key("Weights & Biases.", choices=("disabled", "offline", "online"))
    progress: str = key(
        "Terminal display: auto is live on a terminal and plain lines otherwise.", choices=("auto", "live", "plain")
    )


@dataclass
class RunConfig:
    """The root."""

    seed: int = key("Fixes data order, samples, ties and dropout.", ge=0, lt=2**31)
    num_threads: int | None = key(
        "CPU threads of each computation; blank is one per core. Another count gives other rounding.", ge=1
    )
    loop: str = key("Set by mode=sync and mode=async.", choices=("sync", "async"))
    resume: str = key(
        "never starts a new run. auto goes on with the newest run of the same logging.experiment_name that was cut "
        "short, or starts a new one. A checkpoint's or a run's folder goes on with that."
    )
    resume_mismatch: str = key(
        "When versions, threads or devices are not those of the checkpoint, so that the run cannot go on bit for bit.",
        choices=("refuse", "accept"),
    )
    plan: bool = key("Print the resolved config, the devices and a memory estimate, and stop.")
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    train_model: TrainModelConfig = field(default_factory=TrainModelConfig)
    inference_model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    ref_model: RefModelConfig = field(default_factory=RefModelConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
