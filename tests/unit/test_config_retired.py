"""Keys of the old recipe: refused by name, in one report, never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_iteration.config.leaves import leaves
from expert_iteration.config.loader import run
from expert_iteration.config.retired import NOT_AVAILABLE, USE_INSTEAD, refusal
from expert_iteration.config.schema import RunConfig

CONFIG_DIR = Path(__file__).parents[2] / "config"

OLD_FILE = """\
# @package _global_
defaults:
  - mode: ${mode:async}
  - _self_
  - override hydra/hydra_logging: disabled
env: {dataset: gsm8k, num_envs: 8, repeats: 32}
model: {name: Qwen/Qwen2.5-3B, compile: false}
train:
  exp_name: ei
  dialog_turns_per_batch:
  prioritized_sampling_epsilon: 1e-6
  sync: true
train_model:
  num_devices: 1
  quantization: {enabled: false}
  eval: false
inference_model:
  quantization: {enabled: false}
  attn_implementation: sdpa
  gpu_memory_utilization: 0.75
  enforce_eager: false
ref_model:
  gradient_checkpointing: false
  lora: {enabled: true, r: 8}
  quantization: {enabled: false}
optimizer:
  name: AdamW
  scheduler: {type: cosine_with_warmup}
ray:
  init_config: {num_cpus: 96}
  collector_config: {num_cpus: 1}
logging:
  checkpoint_frequency: 10
hydra:
  job: {chdir: true}
"""


def test_no_key_of_the_schema_is_retired() -> None:
    assert [leaf.key for leaf in leaves() if refusal(leaf.key)] == []


def test_what_to_use_instead_is_in_the_schema() -> None:
    known = {leaf.key for leaf in leaves()} | {leaf.key.rpartition(".")[0] for leaf in leaves()}
    for way_out in [*USE_INSTEAD.values(), *NOT_AVAILABLE.values()]:
        words = [word.strip(",;:()").partition("=")[0] for word in way_out.split()]
        named = [word for word in words if word.partition(".")[0] in known and "." in word]
        assert [word for word in named if word not in known] == []


@pytest.mark.parametrize(
    "key", ["ray.collector_config", "ray.collector_config.num_cpus", "ref_model.lora.r", "train.sync"]
)
def test_a_retired_key_stands_for_all_below_it(key: str) -> None:
    assert refusal(key) is not None


@pytest.mark.parametrize("key", ["rays", "train.synchronous", "ref_model"])
def test_other_keys_are_not_retired(key: str) -> None:
    assert refusal(key) is None


def test_an_old_file_as_a_whole_gives_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(config: RunConfig, run_dir: Path) -> int:
        raise AssertionError("nothing may run")

    (tmp_path / "old.yaml").write_text(OLD_FILE)
    monkeypatch.chdir(tmp_path)
    arguments = ["--config-dir", str(tmp_path), "--config-name", "old"]
    assert run(main, mode="sync", config_dir=CONFIG_DIR, default_config="ei_gsm8k", argv=arguments) == 2
    error = capsys.readouterr().err
    keys = [line.strip().partition("=")[0] for line in error.splitlines()[1:]]
    assert {key for key in keys if refusal(key)} == {
        "train.sync",
        "train_model.quantization",
        "train_model.eval",
        "inference_model.attn_implementation",
        "ref_model.gradient_checkpointing",
        "ref_model.lora",
        "ref_model.quantization",
        "ray.collector_config",
        "logging.checkpoint_frequency",
    }
    assert "inference_model.quantization={'enabled': False}: has to be text" in error
    assert "optimizer.name=AdamW: has to be one of adamw; write optimizer.name=adamw." in error
    assert "write optimizer.scheduler.type=cosine." in error
    assert "start the file's defaults list with ei_gsm8k" in error
    assert "Traceback" not in error
    assert not (tmp_path / "outputs").exists()
