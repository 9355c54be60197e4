#!/usr/bin/env python3
"""Scores responses from a file with any task: how to look at a reward, or to debug one's own, without a model.

    python scripts/score.py responses.jsonl env.dataset=gsm8k env.data_path=data/gsm8k env.reward=graded
    python scripts/score.py outputs/DATE/TIME/samples.jsonl --config-name ei_demo

A row of the file is {"row_id": 7, "response": "..."} or {"prompt": "...", "response": "..."}; a run's samples.jsonl and
eval/*.jsonl will do as well. Exit status: 0 all scored, 1 some response could not be scored, 2 wrong input (which
`--self-check` looks for first), 3 a verifier failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from expert_iteration.config.loader import load, report
from expert_iteration.errors import EXIT_COMPONENT_FAILED, EXIT_OK, EXIT_USER_ERROR, UserError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "config"
EXIT_UNSCORED = 1


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    try:
        return score_file(args)
    except UserError as error:
        print(report(error.problems), file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception:
        traceback.print_exc()
        return EXIT_COMPONENT_FAILED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("responses", type=Path, help="JSON Lines or Parquet file")
    parser.add_argument("overrides", nargs="*", help="keys of the config, as in env.dataset=math")
    parser.add_argument("--config-dir", type=Path, default=CONFIG_DIR)
    parser.add_argument("--config-name", default="ei_gsm8k")
    parser.add_argument("--out", type=Path, help="write the scores to this file, as JSON Lines")
    parser.add_argument("--rows", type=int, default=20, help="rows of the table (default 20)")
    parser.add_argument("--self-check", action="store_true", help="check the task's gold answers first, as a run does")
    return parser.parse_intermixed_args(arguments)


def score_file(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    config = load(["mode=sync", *args.overrides], config_dir=args.config_dir, config_name=args.config_name)

    from rich.console import Console

    from expert_iteration.config import derived
    from expert_iteration.tasks import make_verifier, task_of
    from expert_iteration.tasks.response_file import ScoredResponse, read_responses, score_table, write_scores

    if config.reward_model.name is not None:
        from expert_iteration.reward_model import check_reward_model

        check_reward_model(config)
    task = task_of(config)
    verifier = make_verifier(
        task, workers=derived.verifier_workers(config), time_limit_s=config.env.verifier_time_limit_s
    )
    try:
        if args.self_check:
            task.self_check(verifier.score_many)
        rows = read_responses(args.responses, task)
        if config.reward_model.name is not None:
            import torch

            from expert_iteration.reward_model import with_reward_model

            verifier = with_reward_model(verifier, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        scores = verifier.score_many([(prompt, response) for _, prompt, response in rows])
    finally:
        verifier.close()
    scored = [ScoredResponse(*row, score) for row, score in zip(rows, scores, strict=True)]
    console = Console()
    console.print(score_table(scored, max_rows=args.rows))
    if args.out is not None:
        write_scores(scored, args.out)
    unscored = sum(score.reward is None for score in scores)
    console.print(f"{len(scores) - unscored} scored, {unscored} unscored")
    return EXIT_UNSCORED if unscored else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
