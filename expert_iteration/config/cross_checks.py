"""What has to hold between the keys of a config: each check yields the contradictions that it finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from string import Formatter

from expert_iteration.config import derived
from expert_iteration.config.schema import RunConfig
from expert_iteration.config.task_defaults import REWARD_WEIGHTS, TASK_OPTIONS
from expert_iteration.errors import Problem

GENERATED = ("reasoning_gym", "countdown")
GENERATED_TEST_ROWS = 500


def _topk(config: RunConfig) -> Iterator[Problem]:
    if config.train.topk_size > config.env.repeats:
        yield Problem(
            "train.topk_size",
            config.train.topk_size,
            f"top-k chooses among the env.repeats={config.env.repeats} completions of one prompt and cannot keep more",
            "lower train.topk_size or raise env.repeats",
        )


def _whole_groups(config: RunConfig) -> Iterator[Problem]:
    turns, repeats = derived.dialog_turns_per_batch(config), config.env.repeats
    if turns % repeats:
        below, above = turns // repeats * repeats, (turns // repeats + 1) * repeats
        yield Problem(
            "train.dialog_turns_per_batch",
            turns,
            f"has to be a multiple of env.repeats={repeats}, so that a collection holds whole prompts",
            f"write train.dialog_turns_per_batch={above}" + (f" or {below}" if below else ""),
        )


def _buffer_holds_a_collection(config: RunConfig) -> Iterator[Problem]:
    if derived.dialog_turns_per_batch(config) % config.env.repeats:
        return
    most = derived.max_kept_per_collection(config)
    if config.train.buffer_size is not None and config.train.buffer_size < most:
        yield Problem(
            "train.buffer_size",
            config.train.buffer_size,
            f"has to hold one collection's most, {derived.prompts_per_collection(config)} prompts x "
            f"train.topk_size={config.train.topk_size} = {most}, or samples are lost before they are trained on",
            f"write train.buffer_size={most}, or null for that size",
        )


def _groups_are_visited(config: RunConfig) -> Iterator[Problem]:
    if config.train.shuffle == "groups" and config.train.prioritized_sampling:
        yield Problem(
            "train.shuffle",
            "groups",
            "with train.prioritized_sampling=true samples are drawn one by one and not shuffled",
            "write train.shuffle=samples, or train.prioritized_sampling=false",
        )


def _loop_keys(config: RunConfig) -> Iterator[Problem]:
    """Keys of one loop have no meaning in the other."""
    train = config.train
    if config.loop == "sync":
        for name, blank in (("stale_samples", "drop"), ("collections_in_flight", None), ("queue_size", None)):
            if (value := getattr(train, name)) != blank:
                shown = "null" if blank is None else blank
                way_out = f"write train.{name}={shown}, or start scripts/expert-iteration-async.py"
                yield Problem(f"train.{name}", value, "has a meaning with mode=async only", way_out)
        return
    if train.sync_iter:
        way_out = "write train.sync_iter=false, or start scripts/expert-iteration-sync.py"
        yield Problem("train.sync_iter", "true", "with mode=async collections are always made beside training", way_out)
    if train.weight_update_frequency is None:
        return
    if train.empty_replay_buffer:
        yield Problem(
            "train.empty_replay_buffer",
            "true",
            "with mode=async steps draw from a buffer that collections come into one by one",
            "write train.empty_replay_buffer=false, or train.weight_update_frequency=null to train on each collection",
        )
    if train.stale_samples == "reissue" and train.max_policy_age is None:
        way_out = "write train.stale_samples=drop, or give train.max_policy_age"
        yield Problem("train.stale_samples", "reissue", "without train.max_policy_age nothing is too old", way_out)


def _overlap_publishes_between_collections(config: RunConfig) -> Iterator[Problem]:
    if config.loop == "sync" and not config.train.sync_iter and config.train.weight_update_frequency is not None:
        yield Problem(
            "train.weight_update_frequency",
            config.train.weight_update_frequency,
            "with train.sync_iter=false the engine generates while the policy trains, "
            "and takes new weights between collections only",
            "write train.weight_update_frequency=null, or train.sync_iter=true",
        )


def _overlap_needs_age(config: RunConfig) -> Iterator[Problem]:
    if config.loop == "sync" and not config.train.sync_iter and config.train.max_policy_age == 0:
        yield Problem(
            "train.max_policy_age",
            0,
            "with train.sync_iter=false every sample after the first collection is one publish old, "
            "and none would be trained on",
            "write train.max_policy_age=1 or null, or train.sync_iter=true",
        )


def _age_within_a_collection(config: RunConfig) -> Iterator[Problem]:
    within = config.loop == "sync" and config.train.weight_update_frequency is not None
    if within and config.train.max_policy_age is not None:
        yield Problem(
            "train.max_policy_age",
            config.train.max_policy_age,
            "with train.weight_update_frequency samples grow older while they are trained on, "
            "and their age is checked before that only",
            "write train.max_policy_age=null, or train.weight_update_frequency=null",
        )


def _kl_schedule(config: RunConfig) -> Iterator[Problem]:
    schedule, start = config.train.kl_to_ref_schedule, config.train.kl_to_ref_coeff
    key = "train.kl_to_ref_schedule.end_value"
    if schedule.type == "constant":
        if schedule.end_value is not None:
            yield Problem(
                key,
                schedule.end_value,
                "train.kl_to_ref_schedule.type=constant stays at train.kl_to_ref_coeff",
                f"write {key}=null, or train.kl_to_ref_schedule.type=linear or cosine",
            )
    elif schedule.end_value is None:
        yield Problem(
            key,
            "null",
            f"train.kl_to_ref_schedule.type={schedule.type} needs the coefficient to end with",
            f"write {key}=0.0 or another number, or train.kl_to_ref_schedule.type=constant",
        )
    elif start == 0 and schedule.end_value == 0:
        yield Problem(
            "train.kl_to_ref_schedule.type",
            schedule.type,
            f"train.kl_to_ref_coeff and {key} are both 0, so that nothing moves",
            f"write train.kl_to_ref_schedule.type=constant and {key}=null, or another coefficient",
        )


def _compute_dtype(config: RunConfig) -> Iterator[Problem]:
    mixed, dtype = config.train.mixed_precision, config.train_model.torch_dtype
    if mixed and dtype == "float32":
        yield Problem(
            "train.mixed_precision",
            "true",
            "trained weights are float32 and train_model.torch_dtype=float32 computes in it, so that nothing is mixed",
            "write train.mixed_precision=false, or train_model.torch_dtype=auto or bfloat16",
        )
    if not mixed and dtype == "bfloat16":
        yield Problem(
            "train_model.torch_dtype",
            dtype,
            "trained weights are float32 and train.mixed_precision=false computes in their type",
            "write train.mixed_precision=true, or train_model.torch_dtype=auto or float32",
        )


def _warmup(config: RunConfig) -> Iterator[Problem]:
    if not config.optimizer.scheduler.enabled or derived.dialog_turns_per_batch(config) % config.env.repeats:
        return
    warmup, total = config.optimizer.scheduler.warmup_steps, derived.total_planned_steps(config)
    if warmup >= total:
        yield Problem(
            "optimizer.scheduler.warmup_steps",
            warmup,
            f"the run plans {total} optimizer steps and would end before the warm-up does",
            f"write at most {total - 1}, or raise train.total_dialog_turns or train.epochs",
        )


def _prompt_template(config: RunConfig) -> Iterator[Problem]:
    template = config.env.prompt_template
    if template is None:
        return
    key, shown = "env.prompt_template", repr(template)
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield Problem(key, shown, f"is no template ({error})", "double every brace that is not part of {question}")
        return
    if "question" not in names:
        yield Problem(key, shown, "has to contain {question}", "put {question} where the question belongs")
    if others := sorted({name for name in names if name != "question"}):
        listed = ", ".join("{" + name + "}" for name in others)
        yield Problem(key, shown, f"can fill in {{question}} only, not {listed}", "double every other brace")


def _task_options(config: RunConfig) -> Iterator[Problem]:
    dataset, options = config.env.dataset, config.env.options
    if dataset in GENERATED and config.env.data_path is not None:
        yield Problem(
            "env.data_path",
            config.env.data_path,
            f"env.dataset={dataset} generates its rows and reads no data",
            "write env.data_path=null, or another env.dataset",
        )
    if dataset == "reasoning_gym":
        generator, listed = options.get("generator"), options.get("generators")
        if generator and listed is not None:
            yield Problem(
                "env.options.generators",
                listed,
                f"stands beside env.options.generator={generator}, and only one of them can be meant",
                "write env.options.generator=null and put that generator into the list, or remove the list",
            )
        elif listed is not None and not listed:
            yield Problem(
                "env.options.generators",
                listed,
                "has to be a list of at least one generator",
                "write env.options.generators=[{generator: chain_sum, weight: 2}, {generator: gcd}]",
            )
        elif listed is None and not generator:
            yield Problem(
                "env.options.generator",
                generator,
                "env.dataset=reasoning_gym needs the name of a generator, or several in env.options.generators",
                "write env.options.generator=chain_sum or another of its generators",
            )
    elif dataset == "countdown":
        for name in ("generator", "generators"):
            if options.get(name) is not None:
                yield Problem(
                    f"env.options.{name}",
                    options[name],
                    "env.dataset=countdown is one generator, and its options stand in env.options",
                    f"remove it, or write env.dataset=reasoning_gym and env.options.{name}",
                )
    elif dataset == "custom" and not options.get("reward"):
        yield Problem(
            "env.options.reward",
            options.get("reward"),
            "env.dataset=custom needs the name of a reward function",
            "write env.options.reward=package.module:function",
        )
    known = TASK_OPTIONS.get(dataset, options)  # reasoning_gym's are its generators' own
    for name in options:
        if name not in known:
            yield Problem(
                f"env.options.{name}",
                options[name],
                f"is no option of env.dataset={dataset}",
                f"choose among {', '.join(known)}, or write env.options={{}}",
            )


def _reward_weights(config: RunConfig) -> Iterator[Problem]:
    given, components = config.env.reward_weights, REWARD_WEIGHTS.get(config.env.dataset, {})
    for name in given:
        if name not in components:
            way_out = f"choose among {', '.join(components)}" if components else "write env.reward_weights={}"
            constraint = f"the reward of env.dataset={config.env.dataset} has no such component"
            yield Problem(f"env.reward_weights.{name}", given[name], constraint, way_out)
    if given and config.env.reward == "exact":
        yield Problem(
            "env.reward_weights",
            given,
            "env.reward=exact is 1 or 0, without components",
            "write env.reward=graded, or env.reward_weights={}",
        )


def _reward_model(config: RunConfig) -> Iterator[Problem]:
    model = config.reward_model
    if model.name is None and (model.weight, model.task_weight) != (1.0, 1.0):
        key = "reward_model.weight" if model.weight != 1.0 else "reward_model.task_weight"
        value = model.weight if model.weight != 1.0 else model.task_weight
        yield Problem(key, value, "there is no reward model to weigh", "name one in reward_model.name, or write 1.0")
    if model.name is not None and model.weight == 0:
        way_out = "write another weight, or reward_model.name=null"
        yield Problem("reward_model.weight", 0.0, "a reward model without weight costs time for nothing", way_out)
    if model.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", model.device):
        yield Problem("reward_model.device", model.device, "has to be cpu, cuda or cuda:NUMBER", "write one of these")


def _expert_share(config: RunConfig) -> Iterator[Problem]:
    if derived.max_expert_per_group(config) == 0:
        yield Problem(
            "env.expert_share",
            config.env.expert_share,
            f"with train.topk_size={config.train.topk_size} it leaves no room for expert data in any group",
            f"write at least {1 / config.train.topk_size:.3g}, or env.expert_data=null",
        )


def _held_out_rows(config: RunConfig) -> Iterator[Problem]:
    if not (config.eval.at_start or config.eval.at_end):
        return
    rows = config.env.test_size
    if rows is None and config.env.dataset in GENERATED:
        rows = GENERATED_TEST_ROWS
    if rows is not None and config.eval.num_prompts is not None and config.eval.num_prompts > rows:
        yield Problem(
            "eval.num_prompts",
            config.eval.num_prompts,
            f"there are at most {rows} held-out problems (env.test_size)",
            "raise env.test_size, or write eval.num_prompts=null for all of them",
        )


def _engine_keys(config: RunConfig) -> Iterator[Problem]:
    inference = config.inference_model
    if inference.backend == "local":
        way_out = "write inference_model.backend=vllm"
        for name, blank in (("tensor_parallel_size", 1), ("quantization", None), ("weight_folder", None)):
            if (value := getattr(inference, name)) != blank:
                shown = "null" if blank is None else blank
                yield Problem(
                    f"inference_model.{name}",
                    value,
                    "the in-process engine has no such thing",
                    f"{way_out}, or inference_model.{name}={shown}",
                )
    replicas, rest = divmod(inference.num_devices, inference.tensor_parallel_size)
    if rest or not replicas:
        above = (replicas + 1) * inference.tensor_parallel_size
        yield Problem(
            "inference_model.num_devices",
            inference.num_devices,
            "is replicas times inference_model.tensor_parallel_size="
            f"{inference.tensor_parallel_size}, and has to be a multiple of it",
            f"write inference_model.num_devices={above}, or another inference_model.tensor_parallel_size",
        )


CROSS_CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _topk,
    _whole_groups,
    _buffer_holds_a_collection,
    _groups_are_visited,
    _loop_keys,
    _overlap_publishes_between_collections,
    _overlap_needs_age,
    _age_within_a_collection,
    _kl_schedule,
    _compute_dtype,
    _warmup,
    _prompt_template,
    _task_options,
    _reward_weights,
    _reward_model,
    _expert_share,
    _held_out_rows,
    _engine_keys,
)
