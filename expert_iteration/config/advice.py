"""Remarks on a config that may run, but may not do what was wanted."""

from __future__ import annotations

from expert_iteration.config import derived
from expert_iteration.config.schema import RunConfig


def advice(config: RunConfig) -> list[str]:
    """Remarks on a config without problems: it runs, but may not do what was wanted."""
    remarks = []
    k, n, turns = config.train.topk_size, config.env.repeats, derived.dialog_turns_per_batch(config)
    if not 0.1 <= k / n <= 0.2:
        remarks.append(f"train.topk_size={k} keeps {k / n:.0%} of env.repeats={n}; 10 to 20% is a good start.")
    if config.train.total_dialog_turns < turns:
        remarks.append(
            f"train.total_dialog_turns={config.train.total_dialog_turns} is less than one collection; "
            f"{turns} completions are collected."
        )
    if config.ref_model.num_devices > 1:
        remarks.append(f"ref_model.num_devices={config.ref_model.num_devices}: it runs on the first of them.")
    if config.inference_model.num_devices > 1 and config.inference_model.backend == "local":
        remarks.append(
            f"inference_model.num_devices={config.inference_model.num_devices}: the in-process engine runs on the "
            "first of them; inference_model.backend=vllm has a replica on each."
        )
    if config.env.train_size is not None and config.env.train_size < derived.prompts_per_collection(config):
        remarks.append(
            f"A collection of {derived.prompts_per_collection(config)} prompts visits some of the "
            f"env.train_size={config.env.train_size} rows more than once."
        )
    batch = config.train.optim_batch_size * derived.micro_batches_per_step(config)
    if batch > derived.max_kept_per_collection(config) and not derived.draws_from_buffer(config):
        remarks.append(
            f"An optimizer batch of {batch} samples is larger than a collection's most, "
            f"{derived.max_kept_per_collection(config)}: each epoch is one short step."
        )
    if config.train.max_policy_age is not None and config.train.empty_replay_buffer:
        remarks.append(
            f"train.max_policy_age={config.train.max_policy_age} has nothing to drop: train.empty_replay_buffer=true "
            "leaves the newest collection only."
        )
    if config.train.max_policy_age == 0 and not config.train.empty_replay_buffer:
        remarks.append(
            "train.max_policy_age=0 with train.empty_replay_buffer=false keeps samples that are never trained on again."
        )
    if config.eval.num_transcripts and not (config.eval.at_start and config.eval.at_end):
        remarks.append(
            f"eval.num_transcripts={config.eval.num_transcripts} compares before and after: "
            "it needs eval.at_start and eval.at_end."
        )
    return remarks
