"""Slots by hand: what the bounds allow, and what is generated apart."""

from __future__ import annotations

import pytest

from expert_iteration.engines.slots import SlotPlan, cut_runs, plan_slots


def plan(
    num_prompts: int = 4,
    num_samples: int = 64,
    *,
    max_sequences: int | None = None,
    max_cached_tokens: int | None = None,
) -> SlotPlan:
    return plan_slots(
        100,
        num_prompts,
        num_samples,
        11,
        max_sequences=max_sequences,
        max_cached_tokens=max_cached_tokens,
    )


def test_without_bounds_everything_is_held() -> None:
    # The last of 11 tokens is never fed back.
    assert plan() == SlotPlan(samples=64, prompts=4, prompt_columns=100, own_columns=10)
    assert plan().cached_tokens == 64 * 10 + 4 * 100


def test_prompts_get_twice_the_slots_that_their_samples_fill() -> None:
    # 16 samples each: 20 samples fill two prompts, so 2 * 2 + 1, of which there are only four; 3 fill one.
    assert plan(max_sequences=20).prompts == 4
    assert plan(max_sequences=3).prompts == 3
    assert plan(num_prompts=40, num_samples=640, max_sequences=20).prompts == 5


def test_no_more_prompts_than_samples() -> None:
    assert plan(num_prompts=50, num_samples=50, max_sequences=7) == SlotPlan(7, 7, 100, 10)


@pytest.mark.parametrize(
    ("budget", "samples"),
    [
        (1040, 64),  # exactly everything
        (1039, 63),
        (460, 16),  # of one prompt: 3 prompts are held, 3 * 100 + 16 * 10; the 17th sample would bring a fourth
        (569, 16),
        (570, 17),
        (450, 15),
        (110, 1),
        (1, 1),  # less than one sequence: it runs alone
    ],
)
def test_the_budget_bounds_the_samples(budget: int, samples: int) -> None:
    held = plan(max_cached_tokens=budget)
    assert held.samples == samples
    assert held.cached_tokens <= budget or held.samples == 1


def runs(
    lengths: list[int], *, max_cached_tokens: int | None, max_sequences: int | None = None
) -> list[tuple[int, int]]:
    cut = cut_runs(lengths, [4] * len(lengths), 11, max_sequences=max_sequences, max_cached_tokens=max_cached_tokens)
    return [(run.start, run.stop) for run in cut]


def test_one_run_where_the_budget_does_not_bind() -> None:
    assert runs([10, 10, 1000], max_cached_tokens=None) == [(0, 3)]
    assert runs([10, 10, 1000], max_cached_tokens=12 * 10 + 3 * 1000) == [(0, 3)]
    assert runs([10, 10, 1000], max_cached_tokens=2 * 1000 + 2 * 10, max_sequences=2) == [(0, 3)]


def test_long_prompts_are_kept_apart_where_it_binds() -> None:
    assert runs([10, 15, 20, 21, 42, 1000], max_cached_tokens=2000) == [(0, 3), (3, 5), (5, 6)]
