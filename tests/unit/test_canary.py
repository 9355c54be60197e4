"""Trainer and engine score the same sequences; the engine here is another copy of the model, or of another one."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from expert_iteration.errors import WeightSyncError
from expert_iteration.model import Policy
from expert_iteration.weight_sync import Canary
from tests.unit.test_trainer import CONFIG

SEQUENCES = [(2, 7, 12), (3, 4), (5, 6, 7, 8, 9)]


class Copies:
    """Scores with transformers' own logits, one model for each replica."""

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return [[self._score(model, ids) for ids in sequences] for model in self.models]

    def _score(self, model: nn.Module, ids: Sequence[int]) -> list[float]:
        tokens = torch.tensor([ids])
        log_probs = model(tokens).logits[0, :-1].log_softmax(-1)  # (T - 1, V)
        return log_probs.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG).eval()


def test_the_same_weights_agree() -> None:
    model = make_model()
    canary = Canary(Policy("tiny", model.train(), torch.bfloat16), Copies(make_model(), make_model()), SEQUENCES, 1e-5)
    assert canary.check(3) < 1e-5
    assert model.training


def test_every_replica_is_compared() -> None:
    engine = Copies(make_model(), make_model(seed=1))
    canary = Canary(Policy("tiny", make_model(), torch.float32), engine, SEQUENCES, 1e-3)
    with pytest.raises(WeightSyncError, match=r"version 7 .*replica 1.*inference_model.canary_tolerance"):
        canary.check(7)


def test_the_difference_is_the_mean_over_tokens() -> None:
    class Off(Copies):
        def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
            [scores] = super().score(sequences)
            scores[1][0] += 0.7  # one of the 7 tokens that have one before them
            return [scores]

    canary = Canary(Policy("tiny", make_model(), torch.float32), Off(make_model()), SEQUENCES, 0.2)
    assert canary.check(1) == pytest.approx(0.1, abs=1e-5)


def test_nan_never_passes() -> None:
    broken = make_model()
    broken.lm_head.weight.data.fill_(math.nan)
    canary = Canary(Policy("tiny", make_model(), torch.float32), Copies(broken), SEQUENCES, 1e9)
    with pytest.raises(WeightSyncError, match="nan"):
        canary.check(1)


def test_the_adapter_counts_and_its_dropout_does_not() -> None:
    base = make_model()
    merged = copy.deepcopy(base)
    policy = get_peft_model(
        base, LoraConfig(r=2, lora_alpha=8, lora_dropout=0.5, target_modules=["q_proj"]), adapter_name="default"
    )
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    policy.train()
    canary = Canary(Policy("tiny", policy, torch.float32), Copies(merged), SEQUENCES, 1e-5)
    with pytest.raises(WeightSyncError):
        canary.check(1)
    state = dict(Policy("tiny", policy, torch.float32).merged_state())
    merged.load_state_dict(state)
    assert canary.check(1) < 1e-5


@pytest.mark.parametrize("sequences", [[], [(1, 2), (3,)]])
def test_a_sequence_of_one_token_says_nothing(sequences: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="at least two tokens"):
        Canary(Policy("tiny", make_model(), torch.float32), Copies(make_model()), sequences, 1.0)
