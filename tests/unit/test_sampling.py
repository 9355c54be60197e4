"""Sampling: uniform numbers per seed, filters by hand, the inverse of the cumulative distribution and its edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from expert_iteration.engines.sampling import BLOCK_TOKENS, filtered_scores, inverse_cdf, sample_tokens, uniforms
from expert_iteration.log_probs import gather_log_probs
from expert_iteration.types import SamplingParams


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature, max_tokens=1, stop_token_ids=(), top_p=top_p, top_k=top_k, min_p=min_p)


def logits_of(*probs: float) -> Tensor:
    return torch.tensor([probs]).log()  # (1, V)


def support(logits: Tensor, sampling: SamplingParams) -> list[int]:
    return (filtered_scores(logits, sampling)[0] > -torch.inf).nonzero().flatten().tolist()


def test_uniforms_depend_on_the_own_seed_only() -> None:
    together = uniforms([5, 7, 5], 8)
    assert together.shape == (3, 8)
    assert together.dtype == torch.float32
    assert torch.equal(together[0], together[2])
    assert not torch.equal(together[0], together[1])
    assert torch.equal(together[1:2], uniforms([7], 8))
    assert torch.equal(together[:, :3], uniforms([5, 7, 5], 3))
    assert uniforms([], 4).shape == (0, 4)


def test_uniforms_use_all_64_bits_of_the_seed() -> None:
    low, high = uniforms([1, 1 + 2**32], 4)
    assert not torch.equal(low, high)


def test_uniforms_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    uniforms([1, 2], 16)
    assert torch.equal(torch.get_rng_state(), state)


def test_uniforms_are_uniform_over_seeds_and_steps() -> None:
    drawn = uniforms(range(2000), 8)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 16000 draws: the standard error of the mean is 0.0023, of the share below a tenth 0.0024.
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
    assert (drawn < 0.1).float().mean().item() == pytest.approx(0.1, abs=0.01)
    # Seeds next to each other and steps next to each other do not go together: standard error 0.008.
    assert torch.corrcoef(torch.stack([drawn[:-1].flatten(), drawn[1:].flatten()]))[0, 1].abs() < 0.035
    assert torch.corrcoef(torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()]))[0, 1].abs() < 0.035


def test_greedy_takes_the_likeliest_token_whatever_the_uniform_number() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    assert sample_tokens(logits, torch.tensor([0.99, 0.99]), params(temperature=0)).tolist() == [1, 0]


def test_EI_16_temperature_draws_from_the_tempered_distribution_and_records_the_raw_one() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    scores = filtered_scores(logits, params(temperature=0.5))
    assert scores.log_softmax(-1)[0, 0].item() == pytest.approx(-0.018150, abs=1e-6)
    assert gather_log_probs(logits, torch.tensor([0])).item() == pytest.approx(-0.126928, abs=1e-6)


def test_EI_16_top_p_draws_from_the_nucleus_and_records_the_raw_probability() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    scores = filtered_scores(logits, params(top_p=0.8))
    assert scores.log_softmax(-1)[0, 0].item() == pytest.approx(math.log(0.5 / 0.8), abs=1e-6)  # -0.470004
    assert scores[0, 2] == -torch.inf
    assert gather_log_probs(logits, torch.tensor([0])).item() == pytest.approx(-0.693147, abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (params(), [0, 1, 2, 3, 4]),
        (params(top_k=2), [1, 3]),
        (params(top_k=1), [3]),
        (params(top_k=9), [0, 1, 2, 3, 4]),
        (params(top_p=0.35), [3]),
        (params(top_p=0.45), [1, 3]),
        (params(top_p=0.75), [1, 2, 3]),
        (params(top_p=1e-9), [3]),
        (params(min_p=0.3), [1, 2, 3]),  # at least 0.12
        (params(min_p=0.9), [3]),
        # Half the temperature squares the odds: 0.0025, 0.09, 0.0225, 0.16, 0.01 of 0.285; 0.16 / 0.285 = 0.56.
        (params(temperature=0.5, top_p=0.55), [3]),
        (params(temperature=1.0, top_p=0.55), [1, 3]),
        # top-k first: of 0.3 and 0.4 the larger has 0.571, enough for 0.5, where 0.4 of everything is not.
        (params(top_p=0.5, top_k=2), [3]),
        (params(top_p=0.5), [1, 3]),
        # min-p first: it leaves 0.85 of the mass, of which 0.4 is 0.47.
        (params(top_p=0.46, min_p=0.3), [3]),
    ],
)
def test_supports_by_hand(sampling: SamplingParams, expected: list[int]) -> None:
    assert support(logits_of(0.05, 0.3, 0.15, 0.4, 0.1), sampling) == expected


def test_filters_work_row_by_row() -> None:
    logits = torch.cat([logits_of(0.7, 0.2, 0.1), logits_of(0.1, 0.2, 0.7)])
    kept = filtered_scores(logits, params(top_k=1)) > -torch.inf
    assert kept.tolist() == [[True, False, False], [False, False, True]]


def test_ties_top_p_takes_the_lower_id_and_top_k_takes_both() -> None:
    logits = logits_of(0.25, 0.25, 0.25, 0.25)
    assert support(logits, params(top_p=0.4)) == [0, 1]
    assert support(logits, params(top_k=1)) == [0, 1, 2, 3]


def test_a_tiny_temperature_is_greedy_without_nan() -> None:
    logits = torch.tensor([[80.0, 90.0, -torch.inf, 89.0]])
    scores = filtered_scores(logits, params(temperature=1e-30))
    assert scores[0, 1] == 0
    assert not scores.isnan().any()
    assert sample_tokens(logits, torch.tensor([0.999]), params(temperature=1e-30)).item() == 1


def test_filters_do_not_touch_the_logits() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    before = logits.clone()
    sample_tokens(logits, torch.tensor([0.5]), params(temperature=0.7, top_p=0.6, top_k=2, min_p=0.1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 1), (0.24, 1), (0.25, 3), (0.74, 3), (0.75, 4), (0.999, 4), (1 - 2**-24, 4)]
)
def test_inverse_cdf_by_hand(uniform: float, expected: int) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]])
    assert inverse_cdf(weights, torch.tensor([uniform])).item() == expected


@pytest.mark.parametrize("vocab", [5, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS, 1000])
def test_inverse_cdf_finds_the_only_token_of_positive_weight(vocab: int) -> None:
    tokens = torch.arange(vocab)
    for uniform in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(inverse_cdf(torch.eye(vocab) * 1e-20, torch.full((vocab,), uniform)), tokens)


def test_inverse_cdf_never_returns_a_token_of_weight_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(400, 3000, generator=generator).pow(20)
    weights[torch.rand(400, 3000, generator=generator) < 0.9] = 0
    weights[:, -300:] = 0
    for uniform in (torch.rand(400, generator=generator), torch.zeros(400), torch.full((400,), 1 - 2**-24)):
        tokens = inverse_cdf(weights, uniform)
        assert (weights.gather(-1, tokens.unsqueeze(-1)) > 0).all()


def test_inverse_cdf_agrees_with_the_plain_one_in_double_precision() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(500, 1500, generator=generator).mul(3).exp()
    uniform = torch.rand(500, generator=generator)
    cumulative = weights.double().cumsum(-1)
    plain = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    tokens = inverse_cdf(weights, uniform)
    # Only draws that fall within rounding distance of a step may differ.
    assert (tokens != plain).sum() <= 1


def test_frequencies_match_a_known_distribution() -> None:
    probs = (0.02, 0.08, 0.5, 0.0, 0.3, 0.1)
    uniform = uniforms(range(8000), 1)[:, 0]
    tokens = sample_tokens(logits_of(*probs).expand(8000, -1), uniform, params())
    frequencies = tokens.bincount(minlength=6) / 8000
    assert frequencies[3] == 0
    for frequency, probability in zip(frequencies.tolist(), probs, strict=True):
        # Four standard errors of a share of 8000 draws.
        assert abs(frequency - probability) <= 4 * math.sqrt(probability * (1 - probability) / 8000)


def test_frequencies_match_the_tempered_nucleus() -> None:
    # Temperature 0.5 squares: 0.25, 0.09, 0.04 of 0.38; the nucleus of 0.8 is the first two, 25 to 9.
    uniform = uniforms(range(8000), 1)[:, 0]
    tokens = sample_tokens(logits_of(0.5, 0.3, 0.2).expand(8000, -1), uniform, params(temperature=0.5, top_p=0.8))
    frequencies = tokens.bincount(minlength=3) / 8000
    assert frequencies[2] == 0
    assert frequencies[0].item() == pytest.approx(25 / 34, abs=4 * math.sqrt(25 * 9) / 34 / math.sqrt(8000))
