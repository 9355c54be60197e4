"""`--tiny`: a tiny random model and small sizes, with which a benchmark can be tried in seconds.

Its figures say nothing about speed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expert_iteration.model_source import resolve_model
from tests.tiny import CHARACTERS, SPECIAL, save_tiny_model, write_copy_task

VOCABULARY = len(SPECIAL) + len(CHARACTERS)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str], defaults: Mapping[str, Any]) -> argparse.Namespace:
    """Parses; under `--tiny` the benchmark's arguments have these defaults, and those given still win."""
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and small sizes, to try the command")
    if "--tiny" in arguments:
        parser.set_defaults(**defaults)
    return parser.parse_args(arguments)


@contextmanager
def model_source(args: argparse.Namespace) -> Iterator[str]:
    """What from_pretrained loads: `args.model`, or under `--tiny` a random model in a folder that is then removed."""
    if not args.tiny:
        yield str(resolve_model(args.model))
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(save_tiny_model(Path(folder), max_position_embeddings=1024))


def overrides(folder: Path) -> list[str]:
    """Overrides of config/ei_gsm8k.yaml that make it a run on a tiny random model, written to `folder` with its data,
    without evaluations and without saved models on the way."""
    return [
        f"env.data_path={write_copy_task(folder / 'data')}",
        f"model.name={save_tiny_model(folder / 'model')}",
        "model.chat_template=plain",
        "env.prompt_template='{question}'",
        "env.test_size=8",
        "train.mixed_precision=false",
        "train.checkpoint_frequency=null",
        "eval.at_start=false",
        "eval.at_end=false",
    ]
