"""Everything in one process: builds the parts of a run on the devices that this machine has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock
from rich.text import Text

from expert_iteration import checkpoint
from expert_iteration.chat import ChatEncoder
from expert_iteration.collector import Collector, PromptStream
from expert_iteration.components import Components
from expert_iteration.config import derived
from expert_iteration.config.schema import RunConfig
from expert_iteration.engine_gate import EngineGate
from expert_iteration.engines.checksum import weights_checksum
from expert_iteration.errors import Problem, UserError
from expert_iteration.expert_data import ExpertData, load_expert_data
from expert_iteration.log_probs import can_pack, check_projection
from expert_iteration.loss import SFTLoss
from expert_iteration.metrics.data_logger import RemoteDataLogger
from expert_iteration.metrics.logger import MetricsLogger
from expert_iteration.metrics.memory import peak_memory_gib
from expert_iteration.metrics.sinks import WandbRun
from expert_iteration.metrics.terminal import Terminal, make_terminal
from expert_iteration.model import Policy, check_compiler, load_policy, load_reference_model
from expert_iteration.model_source import check_model, check_vocabulary, load_chat_encoder
from expert_iteration.optim import reference_needed
from expert_iteration.reference import AdapterOffReference, FrozenReference, Reference
from expert_iteration.replay_buffer import ReplayBuffer, Shuffle
from expert_iteration.resume import AUTO
from expert_iteration.reward_model import check_reward_model, with_reward_model
from expert_iteration.run_folder import CHECKPOINTS, METRICS_FILE, claim, remove_leftovers
from expert_iteration.runtime.allocator import keep_freed_memory
from expert_iteration.runtime.engines import build_engine, canary_tolerance, check_backend
from expert_iteration.runtime.plan import device_plan
from expert_iteration.runtime.resumed import ResumedRun, RunIdentity, open_checkpoint
from expert_iteration.saver import RunSaver
from expert_iteration.seeding import derive_seed
from expert_iteration.selection import TopKRewardSelector
from expert_iteration.tasks import make_verifier, task_of
from expert_iteration.tasks.reward_function import load_function
from expert_iteration.trainer import Trainer
from expert_iteration.types import Engine, SamplingParams, ScoringEngine, Task, Verifier
from expert_iteration.weight_sync import Canary, VerifiedWeightSync

CANARY_SEQUENCES = 4
CANARY_TOKENS = 64


def build(config: RunConfig, run_dir: Path) -> Components:
    """All parts of a run. What can be wrong with the user's input is checked before any weights load."""
    keep_freed_memory()
    torch.set_num_threads(config.num_threads or available_cores())
    torch.manual_seed(derive_seed(config.seed, "torch") % 2**32)
    resumed = open_checkpoint(config)
    lock = claim(run_dir, resumed=resumed is not None, may_begin_again=config.resume == AUTO)
    try:
        parts = _build(config, run_dir, resumed, lock)
    except BaseException:
        lock.release()
        raise
    if resumed is not None:
        parts.logger.terminal.print(f"Resumed after step {parts.trainer.optimizer_steps}.")
    return parts


def _build(config: RunConfig, run_dir: Path, resumed: ResumedRun | None, lock: FileLock) -> Components:
    checkpoint_dir = Path(config.logging.checkpoint_dir or run_dir / CHECKPOINTS)
    check_checkpoint_dir(checkpoint_dir, resumed)
    check_model(config.model.name, trust_remote_code=config.model.trust_remote_code)
    check_compiler(config.model)
    check_backend(config)
    check_reward_model(config)
    task = build_task(config)
    identity = RunIdentity.of(config, run_dir, task)
    if resumed is not None:
        resumed.check(identity, config.resume_mismatch)
        resumed.trim_logs(run_dir)
    if resumed is not None or checkpoint_dir == run_dir / CHECKPOINTS:  # one elsewhere may be shared
        remove_leftovers(checkpoint_dir)
    encoder = load_chat_encoder(config.model)
    check_vocabulary(config.model, encoder.tokenizer)
    expert_data = _load_expert_data(config, task, encoder)
    verifier = build_verifier(config, task)
    try:
        parts = _load_parts(
            config,
            run_dir,
            checkpoint_dir=checkpoint_dir,
            task=task,
            encoder=encoder,
            verifier=verifier,
            expert_data=expert_data,
            identity=identity,
            resumed=resumed,
            lock=lock,
        )
    except BaseException:
        verifier.close()
        raise
    if expert_data is not None:
        parts.logger.terminal.print(str(expert_data))
    return parts


def _load_parts(
    config: RunConfig,
    run_dir: Path,
    *,
    checkpoint_dir: Path,
    task: Task,
    encoder: ChatEncoder,
    verifier: Verifier,
    expert_data: ExpertData | None,
    identity: RunIdentity,
    resumed: ResumedRun | None,
    lock: FileLock,
) -> Components:
    """What loads weights, and what works with it. Whatever has been started ends when a later part fails."""
    devices = device_plan(config, torch.cuda.device_count())
    verifier = with_reward_model(verifier, config, devices.inference[0])
    policy = load_policy(config, devices.train[0])
    packed = config.train.packing and can_pack(policy.model)
    check_projection(policy.model, packed=packed)
    reference = _build_reference(config, policy, devices.reference[0])
    trainer = _build_trainer(config, policy, packed=packed)
    base_checksum = weights_checksum(policy.merged_state())
    if resumed is not None:
        resumed.check_base(base_checksum)
        resumed.load_weights(policy)
        trainer.load_state_dict(resumed.state["trainer"])
    sampling = _sampling(config, encoder)
    with ExitStack() as started:
        logger = _build_logger(config, run_dir, resumed)
        started.callback(logger.close)
        data_logger = _build_data_logger(config, logger)
        started.callback(data_logger.close)
        engine = build_engine(config, devices.inference[0], logger.terminal.print)
        started.callback(engine.close)
        stream = PromptStream(
            task.prompts("train"),
            encoder,
            max_prompt_tokens=engine.max_model_len - sampling.max_tokens,
            seed=config.seed,
        )
        canary = _build_canary(config, trainer, engine, task, encoder)
        published = None if resumed is None else resumed.engine_weights()
        weight_sync = VerifiedWeightSync(trainer, engine, canary, published)
        gate = EngineGate()
        parts = Components(
            config=config,
            run_dir=run_dir,
            task=task,
            verifier=verifier,
            encoder=encoder,
            engine=engine,
            engine_gate=gate,
            collector=Collector(
                verifier=verifier,
                stream=stream,
                encoder=encoder,
                engine=engine,
                weight_sync=weight_sync,
                selector=_build_selector(config),
                reference=reference,
                sampling=sampling,
                prompts_per_collection=derived.prompts_per_collection(config),
                repeats=config.env.repeats,
                include_stop=config.inference_model.include_stop_str_in_output,
                seed=config.seed,
                logger=logger,
                gate=gate,
                on_collected=lambda groups: data_logger.submit(groups, trainer.optimizer_steps),
                verify_first=config.loop == "sync",
                expert_data=expert_data,
            ),
            buffer=_build_buffer(config),
            trainer=trainer,
            weight_sync=weight_sync,
            logger=logger,
            data_logger=data_logger,
            eval_prompts=task.prompts("test")[: config.eval.num_prompts],
            eval_sampling=SamplingParams(0.0, sampling.max_tokens, sampling.stop_token_ids),
            saver=RunSaver(
                _build_writer(config, checkpoint_dir, logger.terminal),
                policy,
                encoder.tokenizer,
                {**identity.metadata, "base_checksum": base_checksum},
            ),
            lock=lock,
            resumed=None if resumed is None else resumed.state,
            peak_memory_gib=partial(peak_memory_gib, devices.train[0]),
        )
        started.pop_all()
    return parts


def _build_canary(
    config: RunConfig, trainer: Trainer, engine: Engine, task: Task, encoder: ChatEncoder
) -> Canary | None:
    """The first prompts of the task, for an engine whose weights cannot be hashed as they were sent."""
    if not isinstance(engine, ScoringEngine):
        return None
    prompts = [encoder.encode(prompt)[:CANARY_TOKENS] for prompt in task.prompts("train")[:CANARY_SEQUENCES]]
    return Canary(trainer.policy, engine, prompts, canary_tolerance(config, engine.dtype))


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_checkpoint_dir(directory: Path, resumed: ResumedRun | None = None) -> None:
    """Raises UserError when the folder cannot be written to, or holds the models of another run."""
    checkpoint.check_writable(directory)
    is_own = resumed is not None and resumed.checkpoint.parent.resolve() == directory.resolve()
    if not is_own and checkpoint.latest(directory) is not None:
        constraint = "the folder holds the models of another run, which this one would replace"
        raise UserError(
            Problem("logging.checkpoint_dir", directory, constraint, "name another folder, or leave the key blank")
        )


def build_task(config: RunConfig) -> Task:
    """The task with its data."""
    task = task_of(config)
    wanted, there = config.eval.num_prompts, len(task.prompts("test"))
    if wanted is not None and wanted > there and (config.eval.at_start or config.eval.at_end):
        raise UserError(
            Problem(
                "eval.num_prompts", wanted, f"there are {there} held-out problems", "lower it, or raise env.test_size"
            )
        )
    return task


def build_verifier(config: RunConfig, task: Task) -> Verifier:
    """What scores the task, after the task's self-check with it."""
    verifier = make_verifier(
        task, workers=derived.verifier_workers(config), time_limit_s=config.env.verifier_time_limit_s
    )
    try:
        task.self_check(verifier.score_many)
    except BaseException:
        verifier.close()
        raise
    return verifier


def _load_expert_data(config: RunConfig, task: Task, encoder: ChatEncoder) -> ExpertData | None:
    if config.env.expert_data is None:
        return None
    return load_expert_data(Path(config.env.expert_data), task, encoder, max_tokens=config.inference_model.max_tokens)


def _build_reference(config: RunConfig, policy: Policy, device: torch.device) -> Reference | None:
    train = config.train
    if not reference_needed(train.loss_function, train.kl_to_ref_coeff, train.kl_to_ref_schedule):
        return None
    if policy.is_lora:
        packed = train.packing and can_pack(policy.model)
        return AdapterOffReference(policy, batch_size=train.optim_batch_size, packed=packed)
    model = load_reference_model(config, device)
    return FrozenReference(model, batch_size=train.optim_batch_size, packed=train.packing and can_pack(model))


def _build_trainer(config: RunConfig, policy: Policy, *, packed: bool) -> Trainer:
    train = config.train
    return Trainer(
        policy,
        SFTLoss(train.loss_function, minor_sft_beta=train.minor_sft_beta, normalization=train.loss_normalization),
        optimizer_config=config.optimizer,
        kl_to_ref_coeff=train.kl_to_ref_coeff,
        kl_to_ref_schedule=train.kl_to_ref_schedule,
        total_steps=derived.total_planned_steps(config),
        packed=packed,
    )


def _build_selector(config: RunConfig) -> TopKRewardSelector:
    selection = config.selection
    return TopKRewardSelector(
        config.train.topk_size,
        above=selection.above,
        min_reward=selection.min_reward,
        include_truncated=selection.include_truncated,
        max_expert=derived.max_expert_per_group(config),
        strategy=selection.strategy,
        seed=config.seed,
    )


def _build_buffer(config: RunConfig) -> ReplayBuffer:
    train = config.train
    return ReplayBuffer(
        derived.buffer_size(config),
        prioritized=train.prioritized_sampling,
        alpha=train.prioritized_sampling_alpha,
        beta=train.prioritized_sampling_beta,
        epsilon=train.prioritized_sampling_epsilon,
        seed=derive_seed(config.seed, "replay buffer"),
        shuffle=cast(Shuffle, train.shuffle),
    )


def _sampling(config: RunConfig, encoder: ChatEncoder) -> SamplingParams:
    inference = config.inference_model
    return SamplingParams(
        temperature=inference.temperature,
        max_tokens=inference.max_tokens,
        stop_token_ids=encoder.stop_token_ids,
        top_p=inference.top_p,
        top_k=inference.top_k,
        min_p=inference.min_p,
    )


def _build_logger(config: RunConfig, run_dir: Path, resumed: ResumedRun | None) -> MetricsLogger:
    terminal = make_terminal(config.logging.progress)
    log: Mapping[str, Any] = {} if resumed is None else resumed.state["log"]
    return MetricsLogger(
        run_dir / METRICS_FILE,
        terminal=terminal,
        wandb_run=_build_wandb(config, run_dir, terminal, log.get("wandb_run_id")),
        logging_frequency=config.train.logging_frequency,
        elapsed=log.get("elapsed", 0.0),
    )


def _build_data_logger(config: RunConfig, logger: MetricsLogger) -> RemoteDataLogger:
    """Raises UserError for a name that is no class below RemoteDataLogger."""
    location, key = config.logging.data_logger, "logging.data_logger"
    if location is None:
        return RemoteDataLogger(logger)
    made: Any = load_function(location, key)
    if not (isinstance(made, type) and issubclass(made, RemoteDataLogger)):
        way_out = "name a class below expert_iteration.metrics.data_logger.RemoteDataLogger"
        raise UserError(Problem(key, location, "is no such class", way_out))
    return made(logger)


def _build_wandb(config: RunConfig, run_dir: Path, terminal: Terminal, run_id: str | None) -> WandbRun | None:
    if config.logging.wandb == "disabled":
        return None
    return WandbRun(
        mode="offline" if config.logging.wandb == "offline" else "online",
        project=config.train.exp_name,
        name=derived.experiment_name(config),
        directory=run_dir,
        config=asdict(config),
        warn=terminal.print,
        run_id=run_id,
    )


def _build_writer(config: RunConfig, directory: Path, terminal: Terminal) -> checkpoint.CheckpointWriter:
    return checkpoint.CheckpointWriter(
        directory,
        keep_last=config.train.keep_checkpoints,
        keep_best=config.train.keep_best,
        tell=lambda text: terminal.print(Text(text)),
    )
