"""From the command line to `main(config, run_dir)`: Hydra composes, we check, and every ending has its exit status.

    command line -> overrides (one by one) -> jobs of the sweep -> Hydra composes -> build -> resolve_paths -> problems

Everything wrong with the command line is reported at once, on stderr, before Hydra makes a folder and before anything
heavy is imported. In a sweep a job whose values contradict each other ends with status 2 when its turn comes, and the
other jobs run.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hydra import compose, initialize_config_dir, version
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from expert_iteration.checkpoint_files import read_metadata
from expert_iteration.config.build import Unresolved, build
from expert_iteration.config.checks import problems as value_problems
from expert_iteration.config.overrides import forced, is_hydras, jobs_of, normalise, split_mode, with_mode
from expert_iteration.config.paths import resolve_paths
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import (
    EXIT_COMPONENT_FAILED,
    EXIT_OK,
    EXIT_SIGHUP,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_USER_ERROR,
    Problem,
    UserError,
)
from expert_iteration.resume import NEVER, differences, find

INTERPOLATION = re.compile(r"\$\{[^{}]*\}")
Main = Callable[[RunConfig, Path], int]
HYDRA_VERSION_BASE = "1.3"
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)


def run(main: Main, *, mode: str, config_dir: Path, default_config: str, argv: Sequence[str] | None = None) -> int:
    """Runs `main(config, run_dir)` for the command line, once for each job of a sweep; returns the exit status.

    0 finished, 2 the user's input is wrong (UserError), 3 anything else was raised (its traceback is on stderr), 130
    Ctrl-C, 143 SIGTERM, 129 SIGHUP. The last two reach `main` as SystemExit, so that its `finally` blocks run. A sweep
    goes on after a failed job and returns the largest status. `mode` is the only value that the group `mode` may have.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Or Hydra ends the process itself, with status 1, where it finds an error.
    script, *arguments = sys.argv if argv is None else ["", *argv]
    command = _parse_arguments(arguments, config_dir, default_config)
    try:
        with _signals_raise():
            if not (command.args.help or command.args.hydra_help):
                command = _resumed(command, mode, _check(command, mode))
            statuses = _run_hydra_app(command, main, mode, Path(script).stem or "expert-iteration")
    except UserError as error:
        print(report(error.problems), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C.", file=sys.stderr)
        return EXIT_SIGINT
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except COMPOSITION_ERRORS as error:
        print(report([_composition_problem(command.config_name, error)]), file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception:
        traceback.print_exc()
        return EXIT_COMPONENT_FAILED
    return max(statuses, default=EXIT_OK)


def load(overrides: Sequence[str], *, config_dir: Path, config_name: str, launch_dir: Path | None = None) -> RunConfig:
    """The checked config of a file and overrides, with paths resolved; raises UserError with every problem."""
    normalised, found = normalise(overrides, sweep=False)
    composed = _compose([config_dir], config_name, [forced(override) for override in normalised])
    config, more = _resolve(composed, launch_dir or Path.cwd())
    if found + more:
        raise UserError(*found, *more)
    return config


def report(problems: Sequence[Problem]) -> str:
    """All problems as plain text, one a line."""
    heading = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{heading} in the configuration:", *(f"  {problem}" for problem in problems)])


@dataclass(frozen=True, slots=True)
class _Command:
    """A command line, taken apart."""

    args: argparse.Namespace
    config_dirs: list[Path]
    """Searched in this order."""
    config_name: str
    launch_dir: Path


def _parse_arguments(arguments: Sequence[str], config_dir: Path, default_config: str) -> _Command:
    # Intermixed: Hydra's own parse_args refuses overrides on both sides of a flag.
    args = get_args_parser().parse_intermixed_args(list(arguments))
    launch_dir = Path.cwd()
    users = [launch_dir / path for path in (args.config_dir, args.config_path) if path is not None]
    name = str(args.config_name or default_config).removesuffix(".yaml")
    return _Command(args, [*users, config_dir], name, launch_dir)


def _check(command: _Command, mode: str) -> list[RunConfig]:
    """The config of each job; raises UserError with every problem of the command line and of the files it names."""
    found = _flag_problems(command)
    if found:
        raise UserError(*found)
    overrides, found = normalise(with_mode(command.args.overrides, mode), sweep=command.args.multirun)
    overrides, mode_problems = split_mode(overrides, mode)
    overrides, hydra_problems = _split_hydra_problems(command, overrides)
    found += mode_problems + hydra_problems
    jobs, configs = [], []
    for job in jobs_of(overrides):
        composed = _compose(command.config_dirs, command.config_name, [forced(override) for override in job])
        config, problems = _resolve(composed, command.launch_dir)
        if config.loop in ("sync", "async") and config.loop != mode:
            problems.append(Problem("loop", config.loop, f"follows from mode={mode}", "leave it out"))
        jobs.append(problems)
        configs.append(config)
    if all(jobs):
        found += {str(problem): problem for problems in jobs for problem in problems}.values()
    if found:
        raise UserError(*found)
    return configs


def _resumed(command: _Command, mode: str, configs: Sequence[RunConfig]) -> _Command:
    """The command, or where a run goes on one that names its checkpoint and its folder.

    Raises:
        UserError: there is nothing to go on from, or the config is not that of the run.
    """
    args = command.args
    asked = [config for config in configs if config.resume != NEVER]
    if not asked or any((args.cfg, args.info, args.shell_completion, *(config.plan for config in configs))):
        return command
    config = asked[0]
    if args.multirun:
        way_out = "resume its jobs one by one, each by resume=FOLDER"
        raise UserError(Problem("resume", config.resume, "a sweep cannot be resumed", way_out))
    found = find(config, _run_dirs(command, mode), print)
    if found is None:
        return command
    if problems := differences(read_metadata(found.checkpoint).get("config", {}), config):
        raise UserError(*problems)
    print(f"Goes on from {found.checkpoint}", flush=True)
    folders = [
        f"++{key}='{folder}'" for key, folder in (("resume", found.checkpoint), ("hydra.run.dir", found.run_dir))
    ]
    overrides = [
        text for text in args.overrides if text.lstrip("+").partition("=")[0] not in ("resume", "hydra.run.dir")
    ]
    args = argparse.Namespace(**{**vars(args), "overrides": [*overrides, *folders]})
    return replace(command, args=args)


def _run_dirs(command: _Command, mode: str) -> list[Path]:
    """Folders of runs that the command line may have made: whatever is interpolated in hydra.run.dir is left open."""
    overrides, _ = normalise(with_mode(command.args.overrides, mode), sweep=False)
    overrides = [override for override in overrides if not override.lstrip("+").startswith("mode=")]
    first, *behind = command.config_dirs
    with initialize_config_dir(version_base=HYDRA_VERSION_BASE, config_dir=str(first)):
        own = [*_search_path(behind), *map(forced, overrides)]
        composed = compose(command.config_name, own, return_hydra_config=True)
    plain = OmegaConf.to_container(composed, resolve=False)
    pattern = INTERPOLATION.sub("*", plain["hydra"]["run"]["dir"])  # type: ignore[index, call-overload]
    return [Path(folder) for folder in glob.glob(str(command.launch_dir / pattern))]


def _flag_problems(command: _Command) -> list[Problem]:
    found = [
        Problem("--config-dir", path, "no such folder", "give a folder with YAML files")
        for path in command.config_dirs
        if not path.is_dir()
    ]
    args = command.args
    asked = [name for name in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(args, name)]
    if len(asked) > 1:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in asked)
        found.append(Problem("flags", flags, "exclude one another", "give one of them"))
    if args.resolve and not args.cfg:
        found.append(Problem("flags", "--resolve", "belongs to --cfg", "add --cfg job, or leave it out"))
    if args.experimental_rerun is not None:
        found.append(Problem("--experimental-rerun", args.experimental_rerun, "not available", "repeat the command"))
    known = sorted({path.stem for folder in command.config_dirs for path in folder.glob("*.yaml")})
    if not found and command.config_name not in known:
        found.append(Problem("--config-name", command.config_name, "no such config", f"take one of {', '.join(known)}"))
    return found


def _split_hydra_problems(command: _Command, overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Overrides of Hydra's own keys and groups are composed one by one, since Hydra reports the first problem only."""
    parser, kept, found = OverridesParser.create(), [], []
    for text in overrides:
        override = parser.parse_override(text)
        if not is_hydras(override) or override.key_or_group == "mode" or override.is_sweep_override():
            kept.append(text)
            continue
        try:
            _compose(command.config_dirs, command.config_name, [text])
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            found.append(Problem(override.key_or_group, text.partition("=")[2], reason, "see --hydra-help"))
        else:
            kept.append(text)
    return kept, found


def _compose(config_dirs: Sequence[Path], config_name: str, overrides: Sequence[str]) -> DictConfig:
    first, *behind = config_dirs
    with initialize_config_dir(version_base=HYDRA_VERSION_BASE, config_dir=str(first)):
        return compose(config_name, overrides=[*_search_path(behind), *overrides])


def _search_path(config_dirs: Sequence[Path]) -> list[str]:
    return ["hydra.searchpath=[" + ",".join(f"'file://{path}'" for path in config_dirs) + "]"] if config_dirs else []


def _resolve(composed: DictConfig, launch_dir: Path) -> tuple[RunConfig, list[Problem]]:
    """The typed config with absolute paths, and every problem of its keys, types, values and paths."""
    config, found = build(_plain(composed))
    resolved, path_problems = resolve_paths(config, launch_dir)
    return resolved, found + value_problems(config) + path_problems


def _plain(node: Any) -> Any:
    """Plain containers, interpolations resolved one by one so that each broken one is reported."""
    if isinstance(node, DictConfig):
        return {name: _plain_entry(node, name) for name in node}
    elif isinstance(node, ListConfig):
        return [_plain_entry(node, index) for index in range(len(node))]
    else:
        return node


def _plain_entry(container: DictConfig | ListConfig, name: Any) -> Any:
    if OmegaConf.is_missing(container, name):
        return "???"
    try:
        return _plain(container[name])
    except OmegaConfBaseException as error:
        text = OmegaConf.to_container(container, resolve=False)[name]  # type: ignore[index]
        return Unresolved(str(text), str(error).splitlines()[0])


def _composition_problem(config_name: str, error: Exception) -> Problem:
    return Problem("--config-name", config_name, f"cannot be read: {' '.join(str(error).split())}", "mend that")


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit(143 or 129) in the main thread, as Ctrl-C raises KeyboardInterrupt.

    A SIGHUP that is ignored (nohup) stays ignored.
    """

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_SIGTERM if signal_number == signal.SIGTERM else EXIT_SIGHUP)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_hydra_app(command: _Command, main: Main, mode: str, job_name: str) -> list[int]:
    """Lets Hydra make the run's folder and call `main`; returns the exit status of each job."""
    statuses: list[int] = []
    folders: set[Path] = set()

    def task(composed: DictConfig) -> None:
        statuses.append(_run_job(main, composed, command.launch_dir, folders))

    version.setbase(HYDRA_VERSION_BASE)
    first, *behind = command.config_dirs
    given = command.args.overrides if command.args.hydra_help else with_mode(command.args.overrides, mode)
    overrides, _ = normalise(given, sweep=command.args.multirun)
    args = argparse.Namespace(**vars(command.args))
    args.config_name, args.config_path, args.config_dir = command.config_name, None, None
    args.overrides = [*_search_path(behind), f"hydra.job.name='{job_name}'", *overrides]
    try:
        _run_hydra(args, get_args_parser(), task, config_path=str(first), config_name=command.config_name)
    except OSError as error:  # those of `main` end in _run_job; what is left is Hydra making the run's folder
        key = "hydra.sweep.dir" if command.args.multirun else "hydra.run.dir"
        problem = Problem(key, error.filename, f"cannot be made ({error.strerror})", "name another folder")
        raise UserError(problem) from error
    return statuses


def _run_job(main: Main, composed: DictConfig, launch_dir: Path, folders: set[Path]) -> int:
    """One call of `main`, with the exit status of whatever it raises."""
    try:
        config, found = _resolve(composed, launch_dir)
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        if run_dir in folders:
            found.append(
                Problem("hydra.sweep.subdir", run_dir, "two jobs would write to one folder", "leave it at its default")
            )
        folders.add(run_dir)
        if found:
            raise UserError(*found)
        return main(_own_checkpoint_dir(config), run_dir)
    except UserError as error:
        print(report(error.problems), file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception:
        traceback.print_exc()
        return EXIT_COMPONENT_FAILED


def _own_checkpoint_dir(config: RunConfig) -> RunConfig:
    """In a sweep each job saves to a folder of its own below logging.checkpoint_dir, named by its number."""
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN or config.logging.checkpoint_dir is None:
        return config
    folder = str(Path(config.logging.checkpoint_dir) / str(hydra.job.num))
    return replace(config, logging=replace(config.logging, checkpoint_dir=folder))
