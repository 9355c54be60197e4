"""torch.compile gives what the plain layers give, and the weights keep their names."""

from __future__ import annotations

import copy
import os
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from expert_iteration.config.schema import ModelConfig
from expert_iteration.errors import UserError
from expert_iteration.log_probs import token_log_probs
from expert_iteration.model import check_compiler, compile_layers
from tests.tiny import SIZES

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 11, 12, 0, 0], [13, 14, 15, 16, 17, 0]])
ATTENTION = torch.arange(6) < torch.tensor([[6], [4], [5]])
MASK = ATTENTION & (torch.arange(6) >= 2)


def tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def log_probs_and_gradients(model: torch.nn.Module, *, packed: bool) -> list[torch.Tensor]:
    model.zero_grad()
    values = token_log_probs(model, IDS, MASK, ATTENTION, packed=packed)
    values.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [values.detach(), *gradients]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "variant",
    # Compiling takes about a minute each.
    ["full", pytest.param("lora", marks=pytest.mark.slow), pytest.param("checkpointing", marks=pytest.mark.slow)],
)
def test_compiled_layers_give_the_same(variant: str) -> None:
    plain = tiny()
    if variant == "checkpointing":
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = copy.deepcopy(plain)
    compile_layers(compiled)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    models = [plain.train(), compiled.train()]
    if variant == "lora":
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        models = [get_peft_model(models[0], lora), get_peft_model(models[1], lora)]
        models[1].load_state_dict(models[0].state_dict())
    for packed in (False, True):
        for actual, expected in zip(
            log_probs_and_gradients(models[1], packed=packed),
            log_probs_and_gradients(models[0], packed=packed),
            strict=True,
        ):
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_missing_compiler_is_told_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_compiler(ModelConfig("name", None, False, False))
    with pytest.raises(UserError, match=r"model\.compile=True: needs a C\+\+ compiler, and there is no /nonexistent"):
        check_compiler(ModelConfig("name", None, False, True))
