"""Paths of a config, resolved once against the folder that the command was started in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import MISSING

from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import Problem

PLAIN_TEMPLATE = "plain"
RESUME_WORDS = ("never", "auto")
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")


def resolve_paths(config: RunConfig, launch_dir: Path) -> tuple[RunConfig, list[Problem]]:
    """The config with absolute paths, and a problem for each path that does not lead anywhere.

    env.data_path, env.expert_data, inference_model.weight_folder and logging.checkpoint_dir are paths, and so is resume
    unless it is never or auto. model.name and reward_model.name are where they exist below `launch_dir` or are written
    as one (absolute, ./, ../, ~/, a/b/c or *.gguf), model.chat_template where such a file exists or where it ends in
    .jinja, .jinja2, .j2 or .txt.
    """
    problems: list[Problem] = []
    data_path = _absolute(config.env.data_path, launch_dir)
    if data_path not in (None, MISSING) and not Path(data_path).exists():
        problems.append(Problem("env.data_path", data_path, "no such file or folder", "give one that exists"))
    expert_data = _absolute(config.env.expert_data, launch_dir)
    if expert_data not in (None, MISSING) and not Path(expert_data).is_file():
        way_out = "give a JSON Lines or Parquet file, or write env.expert_data=null"
        problems.append(Problem("env.expert_data", expert_data, "no such file", way_out))
    name = _model_name("model.name", config.model.name, launch_dir, problems)
    reward_model = config.reward_model.name
    if reward_model is not None:
        reward_model = _model_name("reward_model.name", reward_model, launch_dir, problems)
    chat_template = _chat_template(config.model.chat_template, launch_dir, problems)
    resolved = replace(
        config,
        resume=config.resume
        if config.resume in (*RESUME_WORDS, MISSING)
        else str(_absolute(config.resume, launch_dir)),
        env=replace(config.env, data_path=data_path, expert_data=expert_data),
        model=replace(config.model, name=name, chat_template=chat_template),
        reward_model=replace(config.reward_model, name=reward_model),
        inference_model=replace(
            config.inference_model, weight_folder=_absolute(config.inference_model.weight_folder, launch_dir)
        ),
        logging=replace(config.logging, checkpoint_dir=_absolute(config.logging.checkpoint_dir, launch_dir)),
    )
    return resolved, problems


def _absolute(path: str | None, launch_dir: Path) -> str | None:
    if path is None or path == MISSING or not path.strip():
        return path
    return str((launch_dir / Path(path).expanduser()).resolve())


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # A whole Jinja template is longer than a file name may be.
        return False


def _model_name(key: str, name: str, launch_dir: Path, problems: list[Problem]) -> str:
    path = _absolute(name, launch_dir)
    assert path is not None
    if name == MISSING or not name.strip() or name.startswith("package:"):
        return name
    if _exists(path):
        return path
    if name.startswith(("/", "./", "../", "~")) or name.endswith((".gguf", "/")) or name.count("/") > 1:
        problems.append(
            Problem(key, path, "no such file or folder", "give one that exists, or a hub name as in ORG/NAME")
        )
    return name


def _chat_template(template: str | None, launch_dir: Path, problems: list[Problem]) -> str | None:
    if template in (None, MISSING, PLAIN_TEMPLATE) or not template.strip():
        return template
    path = _absolute(template, launch_dir)
    assert path is not None
    if _exists(path):
        return path
    if template.endswith(TEMPLATE_SUFFIXES):
        problems.append(Problem("model.chat_template", path, "no such file", "give one that exists"))
    elif "{" not in template:
        problems.append(
            Problem(
                "model.chat_template",
                repr(template),
                f"is no file, no Jinja template and not `{PLAIN_TEMPLATE}`",
                f"write model.chat_template=null for the tokenizer's own, or {PLAIN_TEMPLATE}",
            )
        )
    return template
