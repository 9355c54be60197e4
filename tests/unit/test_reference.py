"""Reference log-probs against plain forwards. Run: pytest tests/unit/test_reference.py"""

from __future__ import annotations

import copy

import torch
from transformers import LlamaForCausalLM

from expert_iteration.reference import AdapterOffReference, FrozenReference, with_reference
from expert_iteration.replay_buffer import collate
from tests.unit.test_trainer import CONFIG, SAMPLES, make_policy, make_trainer


def plain(model, sample) -> torch.Tensor:
    with torch.no_grad():
        log_probs = model(sample.token_ids[None]).logits.float().log_softmax(-1)[0, :-1]
    values = log_probs.gather(-1, sample.token_ids[1:, None]).squeeze(-1)
    return torch.where(sample.loss_mask, torch.cat([torch.zeros(1), values]), 0.0)


def test_rows_come_back_in_the_order_they_were_given():
    model = LlamaForCausalLM(CONFIG)
    samples = [SAMPLES[2], SAMPLES[0], SAMPLES[3], SAMPLES[1]]
    for batch_size in (1, 3):
        rows = FrozenReference(model, batch_size=batch_size).log_probs(samples)
        for row, sample in zip(rows, samples, strict=True):
            torch.testing.assert_close(row, plain(model, sample), atol=1e-5, rtol=0)
            assert not row.requires_grad


def test_EI_21_the_adapter_is_off_for_the_reference_and_on_again_after_it():
    policy = make_policy(lora=True)
    base = copy.deepcopy(policy.model).unload()
    for _ in range(3):
        make_trainer(policy).step([collate(SAMPLES)], progress=0.0)
    rows = AdapterOffReference(policy, batch_size=2).log_probs(SAMPLES)
    for row, sample in zip(rows, SAMPLES, strict=True):
        torch.testing.assert_close(row, plain(base, sample), atol=1e-5, rtol=0)
        assert (row - plain(policy.model, sample)).abs().max() > 1e-3


def test_without_a_reference_the_samples_stay_as_they_are():
    assert with_reference(None, SAMPLES) == SAMPLES
