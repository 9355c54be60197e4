"""Packed rows by hand, and their log-probs and gradients against each sequence alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from expert_iteration.log_probs import can_pack, token_log_probs
from expert_iteration.packing import pack
from tests.tiny import SIZES

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma": GemmaConfig(**SIZES),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
}


def tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa")
    return model.eval()


def padded(*sequences: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and attention mask, all (B, T), of prompts with responses."""
    width = max(len(prompt) + len(response) for prompt, response in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask, attention = torch.zeros(2, len(sequences), width, dtype=torch.bool)
    for row, (prompt, response) in enumerate(sequences):
        length = len(prompt) + len(response)
        ids[row, :length] = torch.tensor(prompt + response)
        mask[row, len(prompt) : length] = True
        attention[row, :length] = True
    return ids, mask, attention


def test_two_responses_to_one_prompt_by_hand() -> None:
    rows = pack(*padded(([5, 6], [7, 8]), ([5, 6], [9])))
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert rows.attention_mask.int().tolist() == [[[
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]]]  # fmt: skip
    # 7 and 9 are predicted by the 6 in column 1, 8 by the 7 in column 2.
    assert rows.predictors.tolist() == [1, 2, 1]


def test_different_prompts_in_one_row_by_hand() -> None:
    rows = pack(*padded(([5, 6, 7], [8]), ([9], [10])))
    # Two rows of width 4 would have two columns of padding, one row of width 6 has none.
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 9, 10]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert rows.attention_mask[0, 0, 4:].int().tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert rows.predictors.tolist() == [2, 4]


def test_what_all_prompts_begin_with_stands_once_in_a_row_by_hand() -> None:
    rows = pack(*padded(([4, 5, 6], [7]), ([4, 9], [10, 11])))
    assert rows.token_ids.tolist() == [[4, 5, 6, 7, 9, 10, 11]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 1, 2, 3]]
    assert rows.attention_mask.int().tolist() == [[[
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1, 1],
    ]]]  # fmt: skip
    assert rows.predictors.tolist() == [2, 4, 5]


def test_a_prompt_keeps_a_token_of_its_own() -> None:
    # The second prompt is the beginning of the first: only its first token is shared, its last predicts the response.
    rows = pack(*padded(([4, 5, 6], [7]), ([4, 5], [8])))
    assert rows.token_ids.tolist() == [[4, 5, 6, 7, 5, 8]]
    assert rows.predictors.tolist() == [2, 4]


def test_padding_looks_at_itself_alone() -> None:
    # Three rows of ten have six columns of padding, two of seventeen would have ten.
    rows = pack(*padded(([5], [6] * 9), ([7], [8] * 6), ([9], [10] * 6)))
    assert rows.token_ids[1].tolist() == [7, 8, 8, 8, 8, 8, 8, 0, 0, 0]
    padding = rows.attention_mask[1, 0, 7:]
    assert padding.nonzero()[:, 1].tolist() == [7, 8, 9]


def test_only_tokens_that_are_asked_for_are_predicted() -> None:
    ids, mask, attention = padded(([5, 6], [7, 8, 9, 10]))
    mask[0, 3:5] = False  # a second turn: 8 and 9 came from elsewhere
    assert pack(ids, mask, attention).predictors.tolist() == [1, 4]


@pytest.mark.parametrize("has_common_prefix", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_equal_those_of_each_sequence_alone(name: str, has_common_prefix: bool) -> None:
    model = tiny(name)
    assert can_pack(model)
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 64, (count,), generator=generator).tolist()

    system = tokens(3) if has_common_prefix else []
    shared, other = system + tokens(7), system + tokens(4)
    sequences = [
        (shared, tokens(5)),
        (other, tokens(9)),
        (shared, tokens(2)),
        (system + tokens(1), tokens(1)),
        (shared, tokens(8)),
    ]
    ids, mask, attention = padded(*sequences)
    alone = []
    for prompt, response in sequences:
        row = torch.tensor([prompt + response])
        logits = model(input_ids=row).logits.float().log_softmax(-1)
        alone.append(logits[0, len(prompt) - 1 : -1].gather(-1, row[0, len(prompt) :, None]).squeeze(-1))
    expected = torch.cat(alone)
    weights = torch.linspace(0.5, 1.5, len(expected))
    (expected * weights).sum().backward()
    gradients = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    actual = token_log_probs(model, ids, mask, attention, packed=True)
    assert (actual[~mask] == 0).all()
    torch.testing.assert_close(actual[mask], expected, atol=1e-5, rtol=0)
    (actual[mask] * weights).sum().backward()
    for key, value in model.named_parameters():
        if key in gradients:
            assert value.grad is not None
            torch.testing.assert_close(value.grad, gradients[key], atol=1e-4, rtol=1e-4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=9), st.integers(0, 4))
def test_every_sequence_is_found_again_whatever_the_layout(shapes: list[tuple[int, int]], common: int) -> None:
    system = [4, 3, 4, 4][:common]
    prompts = {0: [*system, 5], 1: [*system, 6, 7], 2: [*system, *[8] * 9], 3: [*system, 9, 10, 11]}
    sequences = [(prompts[prompt], [20 + number] * length) for number, (prompt, length) in enumerate(shapes)]
    ids, mask, attention = padded(*sequences)
    rows = pack(ids, mask, attention)
    flat_ids, flat_positions = rows.token_ids.flatten(), rows.position_ids.flatten()
    expected_before = ids[:, :-1][mask[:, 1:]]
    assert torch.equal(flat_ids[rows.predictors], expected_before)
    assert torch.equal(flat_positions[rows.predictors], mask.nonzero()[:, 1] - 1)
    if len({prompt for prompt, _ in shapes}) > 1:
        assert (rows.token_ids[:, : len(system)] == torch.tensor(system)).all()
        assert (rows.token_ids[:, len(system) :] != 4).all()
    # What each predictor attends to is its sequence up to there, in order.
    width = rows.token_ids.shape[1]
    for place, (sequence, column) in zip(rows.predictors.tolist(), mask.nonzero().tolist(), strict=True):
        row, query = divmod(place, width)
        seen = rows.token_ids[row][rows.attention_mask[row, 0, query]]
        assert torch.equal(seen, ids[sequence, :column])


def test_which_models_can_be_packed() -> None:
    assert can_pack(tiny("llama"))
    eager = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="eager")
    assert not can_pack(eager)
    windowed = AutoModelForCausalLM.from_config(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0), attn_implementation="sdpa"
    )
    assert not can_pack(windowed)
