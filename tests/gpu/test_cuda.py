"""The sync loop on a CUDA device. Run: pytest -m gpu tests/gpu"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expert_iteration.config.loader import load
from expert_iteration.loops import sync
from expert_iteration.metrics.sinks import read_records
from expert_iteration.runtime import local
from tests.tiny import save_tiny_model, write_copy_task

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_run_on_cuda(tmp_path, precision, lora):
    config = load(
        [
            f"env.data_path={write_copy_task(tmp_path / 'data')}",
            f"model.name={save_tiny_model(tmp_path / 'model')}",
            "model.chat_template=plain",
            "env.repeats=16",
            "selection.include_truncated=true",
            f"train.mixed_precision={str(precision != 'float32').lower()}",
            "train.dialog_turns_per_batch=128",
            "train.total_dialog_turns=512",
            f"train_model.torch_dtype={precision}",
            f"train_model.lora.enabled={str(lora).lower()}",
            f"inference_model.torch_dtype={precision}",
            f"ref_model.torch_dtype={precision}",
            "inference_model.max_tokens=2",
            "optimizer.scheduler.warmup_steps=0",
            "eval.num_prompts=null",
        ],
        config_dir=ROOT / "config",
        config_name="ei_gsm8k",
    )
    parts = local.build(config, tmp_path)
    assert next(iter(parts.trainer.policy.model.parameters())).is_cuda
    sync.run(parts)
    steps = [record for record in read_records(tmp_path / "metrics.jsonl") if record.kind == "step"]
    assert steps
    tolerance = 1e-4 if precision == "float32" else 0.1
    assert steps[0].values["policy/engine_log_prob_difference"] < tolerance
