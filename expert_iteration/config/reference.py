"""docs/configuration.md, written from the schema and the values in config/.

python -m expert_iteration.config.reference config > docs/configuration.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from expert_iteration.config.leaves import Leaf, leaves
from expert_iteration.config.retired import NOT_AVAILABLE, USE_INSTEAD
from expert_iteration.config.schema import RunConfig

INTRODUCTION = """\
# Configuration

Written from `expert_iteration/config/schema.py` by `python -m expert_iteration.config.reference config`.

Every key is typed, checked and read. Values live in `config/*.yaml`; change one on the command line with `key=value`:

```
python scripts/expert-iteration-sync.py mode=sync --config-name ei_demo train.topk_size=2 plan=true
python scripts/expert-iteration-sync.py mode=sync --config-name ei_demo --multirun train.topk_size=2,4
```

- `plan=true` prints the resolved config, the numbers that follow from it, the devices and a memory estimate, and stops.
- `key=null` leaves a key blank, where it may be. `'None'` is a text and refused.
- Options of a task need no `+`: `env.options.min_terms=3`. `env.options={generator: gcd}` replaces all of them.
- Whatever is wrong is reported at once, each with key, value, constraint and way out, and ends with status 2 before
  any model loads. In a sweep the other jobs go on; the sweep ends with the largest status.
- Relative paths (`env.data_path`, `env.expert_data`, `logging.checkpoint_dir`, `model.name` and `model.chat_template`
  where they are paths) start at the folder that the command was started in. In a sweep each job gets a folder of its
  own below `logging.checkpoint_dir`, named by its number.
- A YAML file of your own goes in with `--config-dir FOLDER --config-name NAME`; begin it with
  `defaults: [ei_gsm8k, _self_]`, so that every key has a value.

The value below is the one in `config/ei_gsm8k.yaml` with `mode=sync`.
"""


def render(config_dir: Path) -> str:
    """The page, in Markdown; values are those of ei_gsm8k.yaml with mode/sync.yaml in `config_dir`."""
    values = OmegaConf.merge(*(OmegaConf.load(config_dir / name) for name in ("ei_gsm8k.yaml", "mode/sync.yaml")))
    known = {leaf.key: leaf for leaf in leaves()}
    lines = [INTRODUCTION]
    for title, section, prefix in _sections(RunConfig, ""):
        own = [known[prefix + field.name] for field in fields(section) if prefix + field.name in known]
        lines += [
            f"## {title}",
            "",
            section.__doc__ or "",
            "",
            "| key | type | value | meaning |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_row(leaf, OmegaConf.select(values, leaf.key)) for leaf in own] + [""]
    lines += [
        "## Keys of other recipes",
        "",
        "Refused, with what to do instead.",
        "",
        "| key | instead |",
        "| --- | --- |",
    ]
    lines += [f"| `{key}` | {way_out} |" for key, way_out in {**USE_INSTEAD, **NOT_AVAILABLE}.items()]
    return "\n".join(lines) + "\n"


def _sections(section: type, key: str) -> Iterator[tuple[str, Any, str]]:
    """Title, class and key prefix of a section and of those below it."""
    yield (f"`{key}`" if key else "The root"), section, (key + "." if key else "")
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _sections(hint, f"{key}.{name}" if key else name)


def _row(leaf: Leaf, value: Any) -> str:
    kind = leaf.type.__name__ + (" or blank" if leaf.optional else "")
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[name]} {bound}" for name, bound in leaf.constraints.items() if name in signs]
    choices = [" \\| ".join(f"`{choice}`" for choice in leaf.constraints.get("choices", ()))]
    limits = ", ".join(text for text in [*bounds, *choices] if text)
    shown = "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    return f"| `{leaf.key}` | {kind}{': ' + limits if limits else ''} | {shown} | {leaf.help} |"


if __name__ == "__main__":
    sys.stdout.write(render(Path(sys.argv[1])))
