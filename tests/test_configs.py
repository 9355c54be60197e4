"""Every YAML composes into a complete, sound config; the documented commands plan; no key goes unread."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from expert_iteration.config.checks import problems
from expert_iteration.config.leaves import leaves
from expert_iteration.config.loader import load, run
from expert_iteration.config.reference import render
from tests.recording import ReadRecorder

ROOT = Path(__file__).parents[1]
CONFIG_DIR = ROOT / "config"
SCRIPT = ROOT / "scripts" / "expert-iteration-sync.py"
FILES = sorted(CONFIG_DIR.rglob("*.yaml"))
KEYS = [leaf.key for leaf in leaves()]
FREE_FORM = "env.options"


def keys_of(values: Any, prefix: str = "") -> set[str]:
    """Dotted keys of nested values; env.options counts as one."""
    if not isinstance(values, dict) or prefix == FREE_FORM + ".":
        return {prefix.removesuffix(".")}
    return {key for name, value in values.items() for key in keys_of(value, f"{prefix}{name}.")}


def test_there_are_files() -> None:
    assert {"ei_demo.yaml", "ei_gsm8k.yaml", "mode/sync.yaml"} <= {str(f.relative_to(CONFIG_DIR)) for f in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIG_DIR)))
def test_every_file_has_keys_of_the_schema_only(file: Path) -> None:
    values = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(values, dict)
    values.pop("defaults", None)
    keys = keys_of(values)
    assert keys
    assert keys - set(KEYS) == set()


@pytest.mark.parametrize("file", sorted(CONFIG_DIR.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_primary_config_is_complete_and_sound(file: Path) -> None:
    config = load([], config_dir=CONFIG_DIR, config_name=file.stem)
    assert problems(config) == []


@pytest.mark.parametrize("file", sorted((CONFIG_DIR / "mode").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_mode_composes(file: Path) -> None:
    assert problems(load([f"mode={file.stem}"], config_dir=CONFIG_DIR, config_name="ei_gsm8k")) == []


def test_the_default_does_what_the_headline_says() -> None:
    config = load([], config_dir=CONFIG_DIR, config_name="ei_gsm8k")
    assert config.train.loss_function == "sft"
    assert config.train.kl_to_ref_coeff == 1.0


def main_of_script(mode: str) -> Callable[..., int]:
    spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / f"expert-iteration-{mode}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[..., int] = module.main
    return main


COMMANDS = [
    "mode=sync train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2",
    "mode=async train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2",
    "mode=sync --config-name ei_ifeval",
    "mode=sync env.dataset=ifeval",
    "mode=sync env.repeats=64 train.topk_size=8",
    "mode=sync train.kl_to_ref_coeff=0.5",
    "mode=sync model.name=meta-llama/Llama-2-7b-hf",
    "mode=sync inference_model.backend=vllm inference_model.num_devices=2",
    "mode=sync --multirun train.topk_size=2,4,8",
    "mode=sync --multirun train.kl_to_ref_coeff=0.5,1.0,2.0",
    "mode=sync --multirun train.topk_size=4,8 train.kl_to_ref_coeff=0.5,1.0",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_plan(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    mode = command.split(maxsplit=1)[0].removeprefix("mode=")
    arguments = [*command.split(), "plan=true"]
    assert run(main_of_script(mode), mode=mode, config_dir=CONFIG_DIR, default_config="ei_gsm8k", argv=arguments) == 0
    output = capsys.readouterr().out
    jobs = 1
    for argument in command.split():
        jobs *= len(argument.split(","))
    assert output.count("optimizer steps") == jobs


@pytest.mark.parametrize(("mode", "other"), [("sync", "async"), ("async", "sync")])
def test_the_other_mode_is_refused(
    mode: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for argument in (f"mode={other}", f"loop={other}"):
        arguments = [argument, "plan=true"]
        status = run(main_of_script(mode), mode=mode, config_dir=CONFIG_DIR, default_config="ei_gsm8k", argv=arguments)
        assert status == 2
        assert argument in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "arguments", "shown"),
    [
        (ROOT, ["--cfg", "job"], "name: org/absent"),
        (ROOT / "scripts", ["plan=true"], "not estimated: org/absent cannot be read: it is not on this machine"),
    ],
    ids=["root", "scripts"],
)
def test_the_script_starts_from_the_root_and_from_its_folder(
    folder: Path, arguments: list[str], shown: str, tmp_path: Path
) -> None:
    given = ["mode=sync", "--config-name", "ei_demo", "model.name=org/absent", f"hydra.run.dir={tmp_path}", *arguments]
    command = [sys.executable, str(SCRIPT.relative_to(folder)), *given]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout


def test_the_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == render(CONFIG_DIR), "run: python -m expert_iteration.config.reference config > docs/configuration.md"
    assert [key for key in KEYS if f"| `{key}` |" not in page] == []


def attributes_read(root: Path) -> set[str]:
    """Names of attributes that the package reads outside the schema and the checks."""
    skipped = {
        root / "config" / name for name in ("schema.py", "checks.py", "cross_checks.py", "advice.py", "paths.py")
    }
    trees = [ast.parse(file.read_text()) for file in sorted(root.rglob("*.py")) if file not in skipped]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_key_is_read() -> None:
    """Statically: the last name of each key is read as an attribute. A run that records its reads proves the rest."""
    read = attributes_read(ROOT / "expert_iteration") | attributes_read(ROOT / "scripts")
    assert [key for key in KEYS if key.rpartition(".")[2] not in read] == []


def test_the_static_check_sees_an_unread_key(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("config.train.epochs = 3\nprint(config.train.topk_size)\n")
    assert attributes_read(tmp_path) == {"train", "topk_size"}


def test_recorder_tells_what_was_read() -> None:
    recorder: Any = ReadRecorder(load([], config_dir=CONFIG_DIR, config_name="ei_demo"))
    assert recorder.train.kl_to_ref_schedule.type == "constant"
    assert recorder.env.options["generator"] == "chain_sum"
    assert recorder.keys_read == {"train.kl_to_ref_schedule.type", "env.options"}
    assert recorder.unread() == set(KEYS) - recorder.keys_read
