"""Publishing to the in-process engine, and what is caught. Run: pytest tests/unit/test_weight_sync.py"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from expert_iteration.engines.local import LocalEngine
from expert_iteration.errors import WeightSyncError
from expert_iteration.model import Policy
from expert_iteration.replay_buffer import collate
from expert_iteration.types import GenerationRequest, SamplingParams
from expert_iteration.weight_sync import VerifiedWeightSync
from tests.unit.test_trainer import CONFIG, SAMPLES, make_trainer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=())


def make(lora: bool = False, engine_dtype=torch.float32):
    torch.manual_seed(0)
    base = LlamaForCausalLM(CONFIG)
    engine_model = copy.deepcopy(base).to(engine_dtype)
    if lora:
        base = get_peft_model(base, LoraConfig(r=2, lora_alpha=16, target_modules="all-linear"))
    trainer = make_trainer(Policy("tiny", base, torch.float32), lr=0.05, kl=0.0)
    engine = LocalEngine(engine_model, max_sequences=4)
    return trainer, engine, VerifiedWeightSync(trainer, engine)


def train(trainer, steps=3):
    for _ in range(steps):
        trainer.step([collate(SAMPLES)], progress=0.0)


def first_parameter(engine: LocalEngine) -> torch.Tensor:
    return next(engine._model.parameters())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("engine_dtype", [torch.float32, torch.bfloat16])
def test_a_publish_arrives_and_counts(lora, engine_dtype):
    trainer, engine, sync = make(lora, engine_dtype)
    assert (trainer.policy_version, engine.policy_version) == (0, 0)
    assert sync.changed_share == 0
    train(trainer)
    assert sync.publish() == 1
    assert (trainer.policy_version, engine.policy_version) == (1, 1)
    assert 0.1 < sync.changed_share <= 1
    sync.verify()


@pytest.mark.parametrize("lora", [False, True])
def test_EI_18_the_engine_answers_with_the_new_weights(lora):
    trainer, engine, sync = make(lora)
    request = GenerationRequest((2, 7, 12), (0,))
    before = engine.generate([request], GREEDY)[0][0]
    train(trainer, steps=8)
    sync.publish()
    (after,) = engine.generate([request], GREEDY)[0]
    fresh_model = LlamaForCausalLM(CONFIG)
    fresh_model.load_state_dict({**fresh_model.state_dict(), **dict(trainer.policy.merged_state())})
    (fresh,) = LocalEngine(fresh_model, max_sequences=4).generate([request], GREEDY)[0]
    assert after.response_ids == fresh.response_ids != before.response_ids


def test_one_corrupted_element_is_caught():
    trainer, engine, sync = make()
    train(trainer)
    sync.publish()
    with torch.no_grad():
        first_parameter(engine).view(-1)[5] += 1e-6
    with pytest.raises(WeightSyncError, match="checksum"):
        sync.verify()


def test_a_skipped_publish_is_caught():
    """The trainer counts a publish that never reached the engine."""
    trainer, _, sync = make()
    train(trainer)
    sync.publish()
    train(trainer)
    trainer.count_publish()
    with pytest.raises(WeightSyncError, match=r"holds version 1 of the weights, version 2 was published"):
        sync.verify()


def test_an_engine_that_takes_the_version_and_not_the_weights_is_caught():
    trainer, engine, sync = make()
    train(trainer)
    held = dict(engine._model.state_dict())
    engine.load_weights = lambda weights, version: LocalEngine.load_weights(engine, held.items(), version)
    with pytest.raises(WeightSyncError, match="checksum"):
        sync.publish()
    assert trainer.policy_version == 0


def test_EI_22_publishing_leaves_the_base_weights_bit_identical():
    torch.manual_seed(0)
    base = LlamaForCausalLM(CONFIG).bfloat16()
    engine = LocalEngine(copy.deepcopy(base), max_sequences=4)
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False), autocast_adapter_dtype=True
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = make_trainer(Policy("tiny", model, torch.bfloat16))
    sync = VerifiedWeightSync(trainer, engine)
    for _ in range(50):
        sync.publish()
    assert trainer.policy_version == 50
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_weights_of_another_model_are_refused_with_their_names():
    trainer, engine, sync = make()
    weights = dict(trainer.policy.merged_state())
    weights["model.norm.scale"] = weights.pop("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        engine.load_weights(weights.items(), 1)
    sync.verify()
