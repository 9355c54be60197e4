"""A reward model on a CUDA device. Run: pytest -m gpu tests/gpu"""

from __future__ import annotations

import pytest
import torch

from expert_iteration.reward_model import check_reward_model, with_reward_model
from tests.unit.test_reward_model import PROMPT, TaskVerifier, config_for, llama, reward_model, save, scores_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda:0")
RESPONSES = ["c", "defgh", "", "ef", "gggggggg"]


@pytest.mark.parametrize("offload", [False, True])
def test_scores_are_those_of_the_cpu_and_the_model_is_where_it_should_be(offload):
    expected = scores_of(reward_model(), RESPONSES)
    model = llama()
    scorer = reward_model(model, device=CUDA, offload=offload)
    devices = []
    model.model.register_forward_pre_hook(lambda *_: devices.append(next(model.parameters()).device))
    for _ in range(2):
        assert scores_of(scorer, RESPONSES) == pytest.approx(expected, abs=1e-4)
    assert set(devices) == {CUDA}
    held = {parameter.device for parameter in model.parameters()}
    assert held == {torch.device("cpu") if offload else CUDA}


def test_the_key_chooses_the_device_and_the_type(tmp_path):
    config = config_for(save(tmp_path, llama()), device="cuda", torch_dtype="bfloat16")
    check_reward_model(config)
    verifier = with_reward_model(TaskVerifier({"c": 1.0}), config, torch.device("cpu"))
    (score,) = verifier.score_many([(PROMPT, "c")])
    assert score.details["reward_model"] == pytest.approx(scores_of(reward_model(), ["c"])[0], rel=0.05)
    weights = verifier._reward_model._model.score.weight
    assert weights.is_cuda and weights.dtype == torch.bfloat16
