"""One optimizer step: normalisation, clipping, precision, failures. Run: pytest tests/unit/test_trainer.py"""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from expert_iteration.config.schema import KLScheduleConfig, OptimizerConfig, SchedulerConfig
from expert_iteration.loss import SFTLoss
from expert_iteration.model import Policy
from expert_iteration.replay_buffer import collate
from expert_iteration.trainer import Trainer
from expert_iteration.types import TrainingSample

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)


def make_policy(lora: bool = False) -> Policy:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    return Policy("tiny", model, torch.float32)


def make_trainer(policy=None, *, lr=1e-2, clip=None, kl=1.0, normalization="sequence", total_steps=10, warmup=0):
    optimizer = OptimizerConfig("adamw", lr, 0.0, clip, SchedulerConfig(True, "cosine", warmup, 0.5))
    return Trainer(
        policy or make_policy(),
        SFTLoss(normalization=normalization),
        optimizer_config=optimizer,
        kl_to_ref_coeff=kl,
        kl_to_ref_schedule=KLScheduleConfig("constant", None),
        total_steps=total_steps,
    )


def make_sample(row_id=0, prompt=3, response=4, *, version=0, start=2) -> TrainingSample:
    length = prompt + response
    mask = torch.arange(length) >= prompt
    return TrainingSample(
        token_ids=(torch.arange(length) * 5 + start) % 32,
        loss_mask=mask,
        engine_log_probs=torch.where(mask, -3.0, float("nan")),
        ref_log_probs=torch.where(mask, -2.5, 0.0),
        reward=1.0,
        policy_version=version,
        row_id=row_id,
        epoch=0,
    )


SAMPLES = [make_sample(row, response=2 + 3 * row, start=row) for row in range(4)]


def weights_after(cuts, **settings):
    trainer = make_trainer(**settings)
    metrics = trainer.step([collate(cut) for cut in cuts], progress=0.0)
    return metrics, torch.cat([p.detach().flatten() for p in trainer.policy.trainable_parameters()])


@pytest.mark.parametrize("normalization", ["sequence", "token"])
def test_EI_05_micro_batches_make_one_step_with_the_gradient_of_the_whole(normalization):
    whole, weights = weights_after([SAMPLES], normalization=normalization, clip=1.0)
    for cuts in ([SAMPLES[:1], SAMPLES[1:]], [[sample] for sample in reversed(SAMPLES)]):
        cut, cut_weights = weights_after(cuts, normalization=normalization, clip=1.0)
        for name in ("loss/total", "loss/main", "loss/kl_to_ref", "optim/grad_norm"):
            assert cut[name] == pytest.approx(whole[name], rel=1e-5)
        # Adam divides by the gradient's size, so rounding of a tiny gradient shows in its step.
        torch.testing.assert_close(cut_weights, weights, atol=2e-4, rtol=0)


def test_the_terms_add_up():
    metrics, _ = weights_after([SAMPLES], kl=0.7)
    total = metrics["loss/main"] + 0.7 * metrics["loss/kl_to_ref"]
    assert metrics["loss/total"] == pytest.approx(total, rel=1e-6)
    assert metrics["loss/kl_to_ref_coeff"] == 0.7


def test_training_lowers_the_loss():
    trainer = make_trainer(kl=0.0)
    losses = [trainer.step([collate(SAMPLES)], progress=0.0)["loss/total"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_clipping_is_counted_and_acts():
    unclipped = make_trainer(clip=None).step([collate(SAMPLES)], progress=0.0)
    assert unclipped["optim/clipped_share"] == 0
    trainer = make_trainer(clip=0.5 * unclipped["optim/grad_norm"], lr=1e-6)
    first = trainer.step([collate(SAMPLES)], progress=0.0)
    assert first["optim/grad_norm"] == pytest.approx(unclipped["optim/grad_norm"], rel=1e-5)
    assert first["optim/clipped_share"] == 1


def test_rate_follows_progress():
    trainer = make_trainer(lr=0.1, total_steps=8)
    rates = [trainer.step([collate(SAMPLES)], progress=step / 8)["optim/learning_rate"] for step in (0, 4)]
    assert rates == pytest.approx([0.1, 0.05])


def test_age_is_version_minus_the_samples_version():
    trainer = make_trainer()
    for _ in range(5):
        trainer.count_publish()
    metrics = trainer.step([collate([make_sample(version=3), make_sample(version=5)])], progress=0.0)
    assert (metrics["policy/version"], metrics["policy/age_mean"], metrics["policy/age_max"]) == (5, 1.0, 2)


def test_EI_17_a_missing_engine_log_prob_is_visible_and_a_present_one_is_compared():
    trainer = make_trainer(kl=0.0)
    metrics = trainer.step([collate([make_sample()])], progress=0.0)
    policy = make_policy()
    with torch.no_grad():
        log_probs = policy.model(make_sample().token_ids[None]).logits.log_softmax(-1)[0, :-1]
    expected = (log_probs.gather(-1, make_sample().token_ids[1:, None]).squeeze(-1)[2:] + 3.0).abs().mean().item()
    assert metrics["policy/engine_log_prob_difference"] == pytest.approx(expected, abs=1e-5)
    # The policy has moved: the difference would no longer be about the engine.
    assert "policy/engine_log_prob_difference" not in trainer.step([collate([make_sample()])], progress=0.0)
    trainer.count_publish()
    fresh = trainer.step([collate([make_sample(version=1)])], progress=0.0)
    assert "policy/engine_log_prob_difference" in fresh


def test_a_step_without_a_finite_loss_is_skipped_and_counted():
    trainer, undisturbed = make_trainer(), make_trainer()
    bad = make_sample(row_id=77)
    bad.ref_log_probs[-1] = math.inf
    good = [collate([make_sample()])]
    trainer.step(good, progress=0.0)
    undisturbed.step(good, progress=0.0)
    for skipped in (1, 2):
        metrics = trainer.step([collate([make_sample(), bad])], progress=0.0)
        assert metrics["optim/skipped_steps"] == trainer.skipped_in_a_row == skipped
        assert not math.isfinite(metrics["loss/total"])
        assert all(parameter.grad is None for parameter in trainer.policy.trainable_parameters())
    # Weights and moments are as if the two had not been: the next step does the same.
    metrics = trainer.step(good, progress=0.5)
    undisturbed.step(good, progress=0.5)
    assert (trainer.optimizer_steps, undisturbed.optimizer_steps) == (4, 2)
    assert (metrics["optim/skipped_steps"], trainer.skipped_in_a_row) == (2, 0)
    pairs = zip(trainer.policy.trainable_parameters(), undisturbed.policy.trainable_parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_only_adapters_move_with_lora():
    policy = make_policy(lora=True)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    make_trainer(policy).step([collate(SAMPLES)], progress=0.0)
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved)


def test_EI_24_float32_weights_move_where_bfloat16_ones_would_not():
    def after_200_steps(dtype):
        weight = torch.nn.Parameter(torch.tensor([0.02], dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0, fused=True)
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.item()

    assert after_200_steps(torch.bfloat16) == 0.02001953125
    assert after_200_steps(torch.float32) == pytest.approx(0.0198, abs=1e-6)
    # The trainer's own weights are of the first kind's opposite.
    trainer = make_trainer(lr=1e-6)
    assert {parameter.dtype for parameter in trainer.policy.trainable_parameters()} == {torch.float32}


def test_EI_45_nothing_that_is_kept_holds_a_graph():
    import gc

    gc.collect()
    gc.freeze()  # what is there already is not looked at
    try:
        trainer = make_trainer()
        counts = []
        for _ in range(12):
            metrics = trainer.step([collate(SAMPLES)], progress=0.0)
            assert all(isinstance(value, float | int) for value in metrics.values())
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    finally:
        gc.unfreeze()
    assert counts[-1] == counts[2] > 0


def test_the_rate_of_the_schedule_is_the_rate_that_moves_the_weights():
    trainer = make_trainer(lr=0.1)
    before = [p.detach().clone() for p in trainer.policy.trainable_parameters()]
    trainer.step([collate(SAMPLES)], progress=1.0)  # where the cosine has come down to zero
    for old, new in zip(before, trainer.policy.trainable_parameters(), strict=True):
        assert torch.equal(old, new)


def test_the_optimizer_sees_the_clipped_gradient(monkeypatch):
    trainer = make_trainer(clip=0.01)
    seen = []
    step = trainer._optimizer.step

    def recording_step():
        seen.append(sum(p.grad.square().sum() for p in trainer.policy.trainable_parameters()).sqrt().item())
        step()

    monkeypatch.setattr(trainer._optimizer, "step", recording_step)
    metrics = trainer.step([collate(SAMPLES)], progress=0.0)
    assert metrics["optim/grad_norm"] > 0.1
    assert seen == [pytest.approx(0.01, rel=1e-4)]
