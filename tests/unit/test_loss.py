"""KL, loss terms and their normalisation against hand-computed values. Run: pytest tests/unit/test_loss.py"""

from __future__ import annotations

import math

import pytest
import torch

from expert_iteration.loss import Denominators, SFTLoss, k3, kl_to_ref
from expert_iteration.types import Batch


def make_batch(lengths, ref=None, weights=None) -> Batch:
    """Sequences of one prompt token and `lengths` response tokens, padded on the right."""
    width = 1 + max(lengths)
    column = torch.arange(width)
    size = torch.tensor(lengths).unsqueeze(1)
    loss_mask = (column >= 1) & (column <= size)
    return Batch(
        token_ids=torch.zeros(len(lengths), width, dtype=torch.long),
        attention_mask=column <= size,
        loss_mask=loss_mask,
        engine_log_probs=torch.full(loss_mask.shape, float("nan")),
        ref_log_probs=ref,
        rewards=torch.ones(len(lengths)),
        importance_weights=torch.ones(len(lengths)) if weights is None else torch.tensor(weights),
        policy_versions=torch.zeros(len(lengths), dtype=torch.long),
        row_ids=torch.arange(len(lengths)),
    )


def rows(*values) -> torch.Tensor:
    width = max(len(row) for row in values)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in values])


def test_EI_02_k3_has_the_right_sign_and_direction():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    per_token = k3(p.log(), q.log(), torch.tensor([True, True]))
    torch.testing.assert_close(per_token, torch.tensor([0.193147, 0.094535]), atol=1e-6, rtol=0)
    exact = (p * (p / q).log()).sum()
    assert (p * per_token).sum().item() == pytest.approx(exact.item(), abs=1e-6) == pytest.approx(0.143841, abs=1e-6)
    assert k3(p.log(), p.log(), torch.tensor([True, True])).tolist() == [0.0, 0.0]


def test_EI_02_a_step_on_the_kl_term_alone_lowers_the_exact_kl():
    logits = torch.tensor([0.0, 0.0], requires_grad=True)
    q = torch.tensor([0.25, 0.75])

    def exact():
        p = logits.softmax(-1)
        return (p * (p / q).log()).sum().item()

    before = exact()
    log_p = logits.log_softmax(-1)
    # The tokens of an on-policy sample in their expected proportions.
    (logits.softmax(-1).detach() * k3(log_p, q.log(), torch.tensor([True, True]))).sum().backward()
    with torch.no_grad():
        logits -= 0.1 * logits.grad
    assert exact() < before


@pytest.mark.parametrize(
    ("log_probs", "ref", "mask", "expected"),
    [
        ([-3, -2, -1, -1], [-3, -2, -1, -1], [0, 0, 1, 1], 0.0),
        ([-3, -2, -1, -1], [-3, -2, -2, -2], [0, 0, 1, 1], math.exp(-1)),
        ([-3, -2, -1, -1, *[0] * 5], [-3, -2, -2, -2, *[0] * 5], [0, 0, 1, 1, *[0] * 5], math.exp(-1)),
        # Only the policy's side zero-filled on the prompt.
        ([0, 0, -1, -1], [-3, -2, -1, -1], [0, 0, 1, 1], 0.0),
    ],
)
def test_EI_03_kl_counts_response_tokens_only(log_probs, ref, mask, expected):
    as_row = lambda values: torch.tensor([values], dtype=torch.float32)
    value = kl_to_ref(as_row(log_probs), as_row(ref), torch.tensor([mask], dtype=torch.bool))
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("masked", [(-200.0, 0.0), (-math.inf, -math.inf), (0.0, math.inf), (math.nan, 1.0)])
def test_EI_04_masked_extremes_leave_no_nan(masked):
    log_probs = torch.tensor([[-1.0, masked[0]]], requires_grad=True)
    value = kl_to_ref(log_probs, torch.tensor([[-1.2, masked[1]]]), torch.tensor([[True, False]]))
    value.backward()
    assert value.item() == pytest.approx(0.0187308, abs=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.181269, 0.0]]), atol=1e-6, rtol=0)


def test_EI_04_a_real_infinity_is_not_hidden():
    value = kl_to_ref(torch.tensor([[-math.inf]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    assert not math.isfinite(value.item())


A, B = [0.0, -1.0, -1.0], [0.0, *[-0.5] * 8]
REF_A, REF_B = [0.0, -1.5, -0.5], [0.0, *[-0.4] * 8]


def total_and_gradient(normalization, cuts, coefficient=0.7, loss_function="sft", weights=(1.0, 1.0)):
    """Loss and gradients of the two sequences, cut into micro-batches as `cuts` says."""
    values = {"A": torch.tensor([A], requires_grad=True), "B": torch.tensor([B], requires_grad=True)}
    refs = {"A": torch.tensor([REF_A]), "B": torch.tensor([REF_B])}
    lengths, weight = {"A": 2, "B": 8}, dict(zip("AB", weights, strict=True))
    micro_batches, log_probs = [], []
    for cut in cuts:
        width = 1 + max(lengths[name] for name in cut)
        pad = lambda row, width=width: torch.nn.functional.pad(row, (0, width - row.shape[1]))
        log_probs.append(torch.cat([pad(values[name]) for name in cut]))
        ref = torch.cat([pad(refs[name]) for name in cut])
        micro_batches.append(make_batch([lengths[name] for name in cut], ref, [weight[name] for name in cut]))
    loss = SFTLoss(loss_function, normalization=normalization)
    denominators = Denominators.of(micro_batches)
    total = 0.0
    for batch, batch_log_probs in zip(micro_batches, log_probs, strict=True):
        terms = loss(batch_log_probs, batch, denominators, kl_to_ref_coeff=coefficient)
        terms.total.backward()
        total += terms.total.item()
    return total, torch.cat([values["A"].grad.flatten(), values["B"].grad.flatten()])


@pytest.mark.parametrize(("normalization", "expected"), [("token", 0.6), ("sequence", 0.75)])
def test_EI_05_means_by_hand(normalization, expected):
    for cuts in (["AB"], ["A", "B"]):
        total, _ = total_and_gradient(normalization, cuts, coefficient=0.0)
        assert total == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss_function", ["sft", "minor_sft"])
@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.25)])
def test_EI_05_cutting_into_micro_batches_changes_nothing(loss_function, normalization, weights):
    whole, whole_gradient = total_and_gradient(normalization, ["AB"], loss_function=loss_function, weights=weights)
    for cuts in (["A", "B"], ["B", "A"], ["BA"]):
        cut, gradient = total_and_gradient(normalization, cuts, loss_function=loss_function, weights=weights)
        assert cut == pytest.approx(whole, abs=1e-6)
        torch.testing.assert_close(gradient, whole_gradient, atol=1e-6, rtol=0)


def test_importance_weights_multiply_both_terms():
    # token mean: A adds 2 of 10 with weight 1, B adds 4 of 10 with weight 0.5
    total, _ = total_and_gradient("token", ["AB"], coefficient=0.0, weights=(1.0, 0.5))
    assert total == pytest.approx(0.2 + 0.2, abs=1e-6)
    kl_a = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.5) - 1 - 0.5) / 10
    kl_b = 8 * (math.exp(0.1) - 1 - 0.1) / 10
    with_kl, _ = total_and_gradient("token", ["AB"], coefficient=1.0, weights=(1.0, 0.5))
    assert with_kl - total == pytest.approx(kl_a + 0.5 * kl_b, abs=1e-6)


def test_minor_sft_by_hand():
    # Sequence A: log p = -2, log p_ref = -2, so -log sigmoid(0) = log 2
    log_probs = torch.tensor([A], requires_grad=True)
    batch = make_batch([2], torch.tensor([REF_A]))
    terms = SFTLoss("minor_sft", minor_sft_beta=0.5)(log_probs, batch, Denominators(2, 1), kl_to_ref_coeff=0.0)
    terms.total.backward()
    assert terms.main.item() == pytest.approx(math.log(2), abs=1e-6)
    # d/dx of -log sigmoid(beta x) at 0 is -beta / 2 on each token
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, -0.25, -0.25]]))


def test_loss_does_not_change_when_prompt_tokens_are_put_before():
    batch = make_batch([2], torch.tensor([REF_A]))
    longer = Batch(
        token_ids=torch.zeros(1, 6, dtype=torch.long),
        attention_mask=torch.ones(1, 6, dtype=torch.bool),
        loss_mask=torch.tensor([[0, 0, 0, 0, 1, 1]], dtype=torch.bool),
        engine_log_probs=torch.full((1, 6), float("nan")),
        ref_log_probs=torch.tensor([[-9.0, -9.0, -9.0, -9.0, -1.5, -0.5]]),
        rewards=batch.rewards,
        importance_weights=batch.importance_weights,
        policy_versions=batch.policy_versions,
        row_ids=batch.row_ids,
    )
    loss = SFTLoss(normalization="token")
    short = loss(torch.tensor([A]), batch, Denominators(2, 1), kl_to_ref_coeff=1.0)
    padded = loss(torch.tensor([[-3.0, -3.0, -3.0, -3.0, -1.0, -1.0]]), longer, Denominators(2, 1), kl_to_ref_coeff=1.0)
    assert short.total.item() == pytest.approx(padded.total.item(), abs=1e-7)


def test_a_missing_reference_is_an_error_and_not_a_zero():
    for loss, coefficient in ((SFTLoss(), 1.0), (SFTLoss("minor_sft"), 0.0)):
        with pytest.raises(ValueError, match="reference"):
            loss(torch.tensor([A]), make_batch([2]), Denominators(2, 1), kl_to_ref_coeff=coefficient)
    terms = SFTLoss()(torch.tensor([A]), make_batch([2]), Denominators(2, 1), kl_to_ref_coeff=0.0)
    assert terms.total.item() == 1.0


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="loss_function"):
        SFTLoss("dpo")
    with pytest.raises(ValueError, match="normalization"):
        SFTLoss(normalization="batch")
