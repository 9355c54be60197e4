"""samples.jsonl: every group that was collected, with what was kept of it."""

from __future__ import annotations

import json
from pathlib import Path

from expert_iteration.collector import Collection


def append_samples(path: Path, collection: Collection, *, index: int) -> None:
    """Appends one JSON object per group: row, epoch, messages, gold answer, and each completion with its reward."""
    with path.open("a", encoding="utf-8") as file:
        for group, selection in zip(collection.groups, collection.selections, strict=True):
            row = {
                "collection": index,
                "row_id": group.prompt.row_id,
                "epoch": group.epoch,
                "messages": [dict(message) for message in group.prompt.messages],
                "gold": group.prompt.gold,
                "outcome": selection.outcome,
                "rollouts": [
                    {
                        "text": rollout.text,
                        "source": rollout.source,
                        "reward": rollout.reward,
                        "details": rollout.score.details,
                        "selected": position in selection.indices,
                        "truncated": rollout.truncated,
                        "tokens": rollout.num_response_tokens,
                        "policy_version": rollout.policy_version,
                    }
                    for position, rollout in enumerate(group.rollouts)
                ],
            }
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
