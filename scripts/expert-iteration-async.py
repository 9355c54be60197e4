#!/usr/bin/env python3
"""Async Expert Iteration: train while the next samples are collected.

`--help` lists the keys and their values, docs/configuration.md explains them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from expert_iteration.config.loader import run
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import EXIT_OK

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"


def main(config: RunConfig, run_dir: Path) -> int:
    """One run, or its plan. The imports are here so that wrong input is told before torch loads."""
    from expert_iteration.runtime.plan import render_plan

    if config.plan:
        print(render_plan(config))
        return EXIT_OK

    from expert_iteration.loops import async_
    from expert_iteration.runtime import local

    async_.run(local.build(config, run_dir))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run(main, mode="async", config_dir=CONFIG_DIR, default_config="ei_gsm8k"))
