"""Imports point down only and each heavy library has one home (docs/architecture.md), read from the syntax trees."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "expert_iteration"
TOP = 5

LEVELS = {
    "errors": 0,
    "types": 0,
    "config": 0,
    "atomic": 0,
    "checkpoint_files": 0,
    "run_folder": 0,
    "resume": 1,
    "seeding": 0,
    "tasks": 1,
    "selection": 1,
    "log_probs": 1,
    "packing": 1,
    "replay_buffer": 1,
    "loss": 1,
    "metrics": 1,
    "statistics": 1,
    "chat": 2,
    "gguf": 2,
    "model_source": 2,
    "model": 2,
    "engines": 2,
    "expert_data": 2,
    "reference": 2,
    "reward_model": 2,
    "optim": 2,
    "trainer": 2,
    "weight_sync": 2,
    "checkpoint": 2,
    "saver": 3,
    "engine_gate": 0,
    "collector": 3,
    "evaluation": 3,
    "sample_log": 3,
    "components": 3,
    "loops": 4,
    "runtime": 4,
    "config.loader": TOP,
}
"""Level of a module or of a folder of modules; the longest name that fits counts."""

HOMES = {
    "hydra": ("config.loader", "config.overrides"),
    "vllm": ("engines.vllm",),
    "ray": ("runtime.ray",),
    "wandb": ("metrics",),
    "torch": tuple(
        name
        for name in LEVELS
        if name not in ("errors", "config", "config.loader", "checkpoint_files", "run_folder", "resume")
    ),
}
"""The only modules that may import a library."""


def module_names(root: Path) -> dict[str, Path]:
    """Modules of the package below root, by their name without the package's."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    names = {".".join(file.relative_to(root / PACKAGE).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items() if name != "__init__"}


def imported(file: Path, modules: set[str]) -> set[str]:
    """Absolute names that a file imports anywhere, functions and TYPE_CHECKING included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            of_package = {name for name in below if name.removeprefix(PACKAGE + ".") in modules}
            names.update(of_package or {str(node.module)})
    return names


def fitting(name: str, known: tuple[str, ...]) -> str | None:
    """The longest of `known` that is `name` or a folder above it."""
    fits = [entry for entry in known if name == entry or name.startswith(entry + ".")]
    return max(fits, key=len, default=None)


def breaches(root: Path) -> list[str]:
    modules, found, graph = module_names(root), [], {}
    for name, file in modules.items():
        level_name = fitting(name, tuple(LEVELS))
        if level_name is None:
            found.append(f"{name} has no level")
            continue
        imports = imported(file, set(modules))
        own = {entry.removeprefix(PACKAGE + ".") for entry in imports if entry.startswith(PACKAGE + ".")}
        graph[name] = own
        for other in sorted(own):
            other_name = fitting(other, tuple(LEVELS))
            if other_name is None:
                found.append(f"{name} imports {other}, which has no level")
            elif LEVELS[other_name] > LEVELS[level_name]:
                found.append(f"{name} imports {other}, which lies above it")
            elif {level_name, other_name} == {"loops", "runtime"}:
                found.append(f"{name} imports {other}: loops and runtime know nothing of each other")
        for library in sorted({entry.partition(".")[0] for entry in imports} & set(HOMES)):
            if fitting(name, HOMES[library]) is None or (library == "torch" and level_name == "config"):
                found.append(f"{name} imports {library}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("cycle: " + " -> ".join(error.args[1]))
    return found


def test_imports_point_down() -> None:
    assert len(module_names(ROOT)) > 20
    assert breaches(ROOT) == []


def test_hydra_stays_out_of_the_scripts_imports_of_the_package() -> None:
    """Scripts are thin: the loader is all they need of Hydra."""
    scripts = sorted((ROOT / "scripts").glob("*.py"))
    assert scripts
    assert [file.name for file in scripts if "ray" in imported(file, set()) or "vllm" in imported(file, set())] == []


@pytest.mark.parametrize(
    ("file", "text", "breach"),
    [
        ("loss.py", "import expert_iteration.trainer", "loss imports trainer, which lies above it"),
        ("loss.py", "def f():\n    from expert_iteration import trainer", "loss imports trainer, which lies above it"),
        (
            "loops/sync.py",
            "from expert_iteration.runtime.local import x",
            "loops and runtime know nothing of each other",
        ),
        ("trainer.py", "from hydra import compose", "trainer imports hydra"),
        ("trainer.py", "import wandb.sdk", "trainer imports wandb"),
        ("config/checks.py", "import torch", "config.checks imports torch"),
        ("engines/local.py", "import vllm", "engines.local imports vllm"),
        ("loops/sync.py", "import ray", "loops.sync imports ray"),
        ("helpers.py", "import os", "helpers has no level"),
        ("model.py", "from expert_iteration.trainer import x", "cycle: "),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, text: str, breach: str) -> None:
    package = tmp_path / PACKAGE
    for name in ("trainer.py", "runtime/local.py", "__init__.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / "trainer.py").write_text("from expert_iteration import model" if file == "model.py" else "")
    assert breaches(tmp_path) == []
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(text)
    found = breaches(tmp_path)
    assert len(found) == 1
    assert breach in found[0]
