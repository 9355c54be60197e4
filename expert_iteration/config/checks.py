"""What has to hold for the values of a config: ranges of single keys, and keys that contradict each other."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from string import Formatter
from typing import Any, cast

from omegaconf import MISSING

from expert_iteration.config import derived
from expert_iteration.config.leaves import Leaf, leaves, value_of
from expert_iteration.config.schema import RunConfig
from expert_iteration.config.task_defaults import REWARD_WEIGHTS, TASK_OPTIONS
from expert_iteration.errors import Problem

GENERATED = ("reasoning_gym", "countdown")
GENERATED_TEST_ROWS = 500


def problems(config: RunConfig) -> list[Problem]:
    """Everything that is wrong with the values, range problems first; empty when the run may start.

    A leaf that holds MISSING was reported where the config was built; like a leaf out of its range it takes no part
    in checks across keys, so that no problem is the consequence of another.
    """
    found: list[Problem] = []
    unusable: set[str] = set()
    for leaf in leaves():
        value = value_of(config, leaf.key)
        problem = None if value == MISSING else leaf_problem(leaf, value)
        found.extend([problem] if problem else [])
        if problem or value == MISSING:
            unusable.add(leaf.key)
    usable = cast(RunConfig, _UsableKeys(config, "", frozenset(unusable)))
    for check in CROSS_CHECKS:
        found.extend(_run_where_usable(check, usable))
    return found


def leaf_problem(leaf: Leaf, value: Any) -> Problem | None:
    """What is wrong with one value of the right type."""
    if value is None:
        return None
    elif isinstance(value, str) and not value.strip():
        way_out = f"write {leaf.key}=null for blank" if leaf.optional else "give a text"
        return Problem(leaf.key, repr(value), "may not be an empty text", way_out)
    elif "choices" in leaf.constraints:
        return _choice_problem(leaf, value)
    elif isinstance(value, dict):
        return _free_form_problem(leaf, value)
    elif isinstance(value, float) and not math.isfinite(value):
        return Problem(leaf.key, value, "has to be a finite number", "give a number")
    else:
        return _range_problem(leaf, value)


BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
}


def _range_problem(leaf: Leaf, value: Any) -> Problem | None:
    wanted = [(*BOUNDS[name], bound) for name, bound in leaf.constraints.items()]
    if all(holds(value, bound) for _, holds, bound in wanted):
        return None
    listed = " and ".join(f"{sign} {bound}" for sign, _, bound in wanted)
    return Problem(leaf.key, value, f"has to be {listed}", "give a number in that range")


def _choice_problem(leaf: Leaf, value: str) -> Problem | None:
    choices = leaf.constraints["choices"]
    if value in choices:
        return None
    nearest = get_close_matches(value.lower(), choices, n=1) or [c for c in choices if value.lower().startswith(c)]
    way_out = f"write {leaf.key}={nearest[0]}" if nearest else f"take {' or '.join(choices)}"
    return Problem(leaf.key, value, f"has to be one of {', '.join(choices)}", way_out)


def _free_form_problem(leaf: Leaf, options: Mapping[str, Any]) -> Problem | None:
    entry = _not_finite(options)
    if entry is None:
        return None
    return Problem(f"{leaf.key}.{entry}", "nan or inf", "has to be a finite number", "give a number")


def _not_finite(options: Mapping[str, Any]) -> str | None:
    """Name of the first entry that is not a finite number, as in `generators[1].weight`."""
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            return str(name)
        if isinstance(value, Mapping) and (below := _not_finite(value)):
            return f"{name}.{below}"
        if isinstance(value, list) and (
            below := _not_finite({f"{name}[{index}]": item for index, item in enumerate(value)})
        ):
            return below
    return None


class _UnusableKeyError(Exception):
    """A check across keys read a key that has a problem of its own."""


class _UsableKeys:
    """Reads like a config; raises where a check reads a key that has a problem of its own."""

    def __init__(self, section: Any, prefix: str, unusable: frozenset[str]) -> None:
        self._section, self._prefix, self._unusable = section, prefix, unusable

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._unusable:
            raise _UnusableKeyError(key)
        value = getattr(self._section, name)
        return _UsableKeys(value, key + ".", self._unusable) if is_dataclass(value) else value


def _run_where_usable(check: Callable[[RunConfig], Iterator[Problem]], config: RunConfig) -> list[Problem]:
    try:
        return list(check(config))
    except _UnusableKeyError:
        return []


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


def _overlap_publishes_between_collections(config: RunConfig) -> Iterator[Problem]:
    if not config.train.sync_iter and config.train.weight_update_frequency is not None:
        yield Problem(
            "train.weight_update_frequency",
            config.train.weight_update_frequency,
            "with train.sync_iter=false the engine generates while the policy trains, "
            "and takes new weights between collections only",
            "write train.weight_update_frequency=null, or train.sync_iter=true",
        )


def _overlap_needs_age(config: RunConfig) -> Iterator[Problem]:
    if not config.train.sync_iter and config.train.max_policy_age == 0:
        yield Problem(
            "train.max_policy_age",
            0,
            "with train.sync_iter=false every sample after the first collection is one publish old, "
            "and none would be trained on",
            "write train.max_policy_age=1 or null, or train.sync_iter=true",
        )


def _age_within_a_collection(config: RunConfig) -> Iterator[Problem]:
    if config.train.max_policy_age is not None and config.train.weight_update_frequency is not None:
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


CROSS_CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _topk,
    _whole_groups,
    _buffer_holds_a_collection,
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
)


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
    for role, count in (
        ("inference_model", config.inference_model.num_devices),
        ("ref_model", config.ref_model.num_devices),
    ):
        if count > 1:
            remarks.append(f"{role}.num_devices={count}: this version runs it on the first of them.")
    if config.env.train_size is not None and config.env.train_size < derived.prompts_per_collection(config):
        remarks.append(
            f"A collection of {derived.prompts_per_collection(config)} prompts visits some of the "
            f"env.train_size={config.env.train_size} rows more than once."
        )
    batch = config.train.optim_batch_size * derived.micro_batches_per_step(config)
    if batch > derived.max_kept_per_collection(config):
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
