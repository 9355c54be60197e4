"""The documentation says what the code does: glossary, commands, files and keys."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from expert_iteration.config.schema import RunConfig
from expert_iteration.metrics.glossary import GLOSSARY, GROUPS, markdown_tables

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RUN_FOLDERS = (".hydra/", "checkpoints/", "multirun/", "outputs/")
"""What a run writes is no part of the repository."""
SCRIPT = "scripts/expert-iteration-sync.py"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)")
METRIC_ROW = re.compile(r"^\| `([a-z]+/[\w*]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
MAKE_TARGET = re.compile(r"\bmake ([a-z][\w-]*)")
FILE_NAME = re.compile(r"(?<![\w./-])([\w.-]+(?:/[\w.-]+)*\.(?:py|md|yaml|toml|sh))(?![\w/-])")
OVERRIDE = re.compile(r"(?<!\S)\+*([a-z_]+(?:\.[a-z_]+)+)=")
CONFIG_NAME = re.compile(r"--config-name[= ]([a-z]\w*)")


def code_of(text: str) -> list[str]:
    """Fenced blocks and inline code: where a page speaks of files and commands rather than of the world."""
    blocks = [block for _, block in FENCE.findall(text)]
    return blocks + INLINE_CODE.findall(FENCE.sub("", text))


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


def schema_keys(schema: Any, prefix: str = "") -> set[str]:
    """Every key of the schema, groups included."""
    keys = set()
    for name, hint in get_type_hints(schema).items():
        keys.add(prefix + name)
        if is_dataclass(hint):
            keys |= schema_keys(hint, f"{prefix}{name}.")
    return keys


@cache
def repository_files() -> list[str]:
    """Paths that are tracked or could be; what .gitignore leaves out is no part of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return listed.stdout.splitlines()
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]


def missing_files(code: list[str], files: list[str]) -> set[str]:
    """Named files that no path of the repository ends with. A file map may name a file without its folder."""
    named = {name for piece in code for name in FILE_NAME.findall(piece) if not name.startswith(RUN_FOLDERS)}
    return {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in files)}


def test_the_checks_below_notice_what_is_wrong() -> None:
    code = code_of(
        "```\nmake demo\nloss.py   the loss\nscripts/no.py\n```\n`make tset` and `docs/x.md`, but not see.md"
    )
    assert missing_files(code, ["expert_iteration/loss.py"]) == {"scripts/no.py", "docs/x.md"}
    assert {target for piece in code for target in MAKE_TARGET.findall(piece)} == {"demo", "tset"}
    assert make_targets("demo: venv\n\techo\nPYTHON := x\ntest:\n") == {"demo", "test"}
    assert OVERRIDE.findall("python a.py mode=sync train.topk_size=2,4 env.options.x=1") == [
        "train.topk_size",
        "env.options.x",
    ]
    assert {"train", "train.topk_size", "train_model.lora.r"} <= schema_keys(RunConfig)
    assert len(schema_keys(RunConfig)) > len(fields(RunConfig))


def logged_names(nodes: list[ast.AST]) -> set[str]:
    """Metric names in the code: whole; as f"group/{name}" with name a string elsewhere; time/name as stage("name")."""
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    groups = "|".join(GROUPS)
    whole = {text for text in texts if re.fullmatch(rf"({groups})/\w+", text)}
    starts = {text for text in texts if re.fullmatch(rf"({groups})/", text)} - {"time/"}
    composed = {name for name in GLOSSARY for start in starts if name.startswith(start) and name[len(start) :] in texts}
    composed |= {f"{start}*" for start in starts} & GLOSSARY.keys()
    stages = {
        f"time/{node.args[0].value!s}"
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "stage"
        and isinstance(node.args[0], ast.Constant)
    }
    return whole | composed | stages


def test_what_the_code_logs_is_the_glossary() -> None:
    paths = [path for path in ROOT.glob("expert_iteration/**/*.py") if path.name != "glossary.py"]
    assert paths
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    assert logged_names(nodes) == GLOSSARY.keys()


def test_the_metrics_page_holds_the_glossary_and_nothing_else() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = {name: (unit, meaning) for name, unit, meaning in METRIC_ROW.findall(page)}
    assert rows == {name: tuple(metric) for name, metric in GLOSSARY.items()}
    assert page.endswith(markdown_tables()), (
        "the tables of docs/metrics.md are the output of `python -m expert_iteration.metrics.glossary`"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not missing_files(code_of(text), repository_files())
    links = [link for link in LINK.findall(FENCE.sub("", text)) if "://" not in link and not link.startswith("mailto:")]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_use_targets_configs_and_keys_that_exist(page: Path) -> None:
    code = code_of(page.read_text(encoding="utf-8"))
    targets = {target for piece in code for target in MAKE_TARGET.findall(piece)}
    assert targets <= (make_targets((ROOT / "Makefile").read_text(encoding="utf-8")) if targets else set())
    configs = {name for piece in code for name in CONFIG_NAME.findall(piece)}
    assert configs <= {path.stem for path in ROOT.glob("config/*.yaml")}
    commands = [
        line for piece in code for line in piece.replace("\\\n", " ").splitlines() if "expert-iteration-" in line
    ]
    keys = {key for command in commands for key in OVERRIDE.findall(command) if not key.startswith("hydra.")}
    assert {key for key in keys if not key.startswith(("env.options.", "ray.init_config."))} <= schema_keys(RunConfig)


def test_the_readme_names_both_commands_and_the_script() -> None:
    code = code_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {"demo", "test"} <= {target for piece in code for target in MAKE_TARGET.findall(piece)}
    assert any(SCRIPT in piece for piece in code)
