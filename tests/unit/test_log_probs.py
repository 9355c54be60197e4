"""Log-probs of given tokens against plain full-vocabulary forwards. Run: pytest tests/unit/test_log_probs.py"""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
)

from expert_iteration.log_probs import check_projection, gather_log_probs, position_ids, token_log_probs
from tests.tiny import SIZES

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, final_logit_softcapping=2.0, attn_logit_softcapping=50.0),
    "granite": GraniteConfig(**SIZES, logits_scaling=4.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.25),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
}


def tiny(name: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()


def reference_log_probs(model, token_ids):
    """(1, T) of one unpadded sequence, the plain way; nothing for the first token."""
    logits = model(input_ids=token_ids).logits.float()
    return logits.log_softmax(-1)[0, :-1].gather(-1, token_ids[0, 1:, None]).squeeze(-1)


def test_EI_16_log_softmax_by_hand():
    logits = torch.tensor([2.0, 0.0])
    assert gather_log_probs(logits, torch.tensor(0)).item() == pytest.approx(-0.126928, abs=1e-6)
    assert gather_log_probs(logits / 0.5, torch.tensor(0)).item() == pytest.approx(-0.018150, abs=1e-6)


def test_EI_45_gather_minus_logsumexp_equals_log_softmax():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 8
    targets = torch.arange(5) * 60
    expected = logits.log_softmax(-1)[torch.arange(5), targets]
    torch.testing.assert_close(gather_log_probs(logits, targets), expected, atol=2e-6, rtol=0)
    assert gather_log_probs(logits.bfloat16(), targets).dtype == torch.float32


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk_tokens", [3, 512])
@torch.no_grad()
def test_padded_batch_equals_each_sequence_alone(name, chunk_tokens):
    """EI_45: the same sequence alone, padded on the right and on the left gives the same log-probs."""
    model = tiny(name)
    sequences = [torch.arange(5, 5 + n).unsqueeze(0) for n in (9, 6, 4)]
    for side in ("left", "right"):
        width = 9
        ids, attention = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            n = sequence.shape[1]
            where = slice(width - n, width) if side == "left" else slice(0, n)
            ids[row, where], attention[row, where] = sequence[0], True
        mask = attention & (position_ids(attention) >= 2)  # the first two tokens of each are the prompt
        values = token_log_probs(model, ids, mask, attention, chunk_tokens=chunk_tokens)
        assert (values[~mask] == 0).all()
        for row, sequence in enumerate(sequences):
            expected = reference_log_probs(model, sequence)[1:]
            torch.testing.assert_close(values[row][mask[row]], expected, atol=2e-5, rtol=0)


def test_gradient_equals_the_plain_one_for_any_chunk():
    ids = torch.arange(3, 15).reshape(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)

    def gradients(chunk_tokens):
        model = tiny("llama")
        if chunk_tokens is None:
            logits = model(input_ids=ids).logits.log_softmax(-1)
            loss = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)[mask[:, 1:]].sum()
        else:
            loss = token_log_probs(model, ids, mask, chunk_tokens=chunk_tokens).sum()
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain = gradients(None)
    for chunk_tokens in (2, 100):
        for name, gradient in gradients(chunk_tokens).items():
            torch.testing.assert_close(gradient, plain[name], atol=1e-5, rtol=1e-4)


def test_adapters_of_a_peft_model_are_active():
    torch.manual_seed(0)
    model = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    ids = torch.arange(3, 9).unsqueeze(0)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    with torch.no_grad():
        adapted = token_log_probs(model, ids, mask)
        with model.disable_adapter():
            base = token_log_probs(model, ids, mask)
        torch.testing.assert_close(adapted[0, 1:], reference_log_probs(model, ids), atol=2e-5, rtol=0)
    assert (adapted - base).abs().max() > 1e-3


def test_the_first_token_cannot_be_asked_for():
    with pytest.raises(ValueError, match="first token"):
        token_log_probs(tiny("llama"), torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_of_each_family_is_known(name):
    check_projection(tiny(name))


def test_an_unknown_head_is_noticed():
    model = tiny("llama")
    plain_forward = model.forward

    def odd_forward(*args, **kwargs):
        output = plain_forward(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = odd_forward
    with pytest.raises(ValueError, match="head"):
        check_projection(model)


def test_log_of_a_near_certain_token_is_not_rounded_to_one():
    assert gather_log_probs(torch.tensor([20.0, 0.0]), torch.tensor(0)).item() == pytest.approx(
        -math.log1p(math.exp(-20.0)), abs=1e-6
    )
