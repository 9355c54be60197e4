"""vLLM replicas as Ray actors: real vLLM, real Ray, real signals, a tiny random model.

A replica takes about half a minute to start, so the tests of a healthy engine share one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from expert_iteration.config.loader import load
from expert_iteration.config.schema import RunConfig
from expert_iteration.engines.checksum import deduplicated_state
from expert_iteration.engines.local import LocalEngine
from expert_iteration.errors import ComponentError, WeightSyncError
from expert_iteration.model import Policy
from expert_iteration.runtime.engines import build_engine
from expert_iteration.types import GenerationRequest, SamplingParams
from expert_iteration.weight_sync import Canary
from tests.tiny import save_tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it for the CPU")
ray = pytest.importorskip("ray", reason="ray is not installed")
from expert_iteration.runtime.ray.engine import VllmRayEngine  # noqa: E402  # it imports ray

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PROMPTS = [(3, 4, 5), (6, 7), (3, 4, 5, 6, 7, 8, 9), (10, 11, 12)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(2,))
WARM = SamplingParams(temperature=1.5, max_tokens=12, stop_token_ids=(2,), top_p=0.9, top_k=8)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the head tied to the embedding, as small models have it; those of test_vllm_run.py are not tied."""
    # vLLM's attention on a CPU takes heads of 32 and more.
    return save_tiny_model(
        tmp_path_factory.mktemp("tiny"), tied=True, hidden_size=128, num_attention_heads=2, num_key_value_heads=1
    )


@pytest.fixture(scope="module")
def config(model_folder: Path) -> RunConfig:
    overrides = [
        f"model.name={model_folder}",
        "model.chat_template=plain",
        "inference_model.backend=vllm",
        "inference_model.enforce_eager=true",
        "inference_model.kv_cache_gib=0.1",
        "inference_model.max_tokens=12",
        "inference_model.time_limit_s=120",
        "train.mixed_precision=false",
        "inference_model.torch_dtype=float32",  # auto is bfloat16 on some CPUs, and these tests compare numbers
    ]
    return load(overrides, config_dir=ROOT / "config", config_name="ei_gsm8k")


@pytest.fixture(scope="module")
def make_engine(local_ray: None, config: RunConfig) -> Callable[..., VllmRayEngine]:
    def make(told: list[str] | None = None, **keys: object) -> VllmRayEngine:
        for name, value in keys.items():
            setattr(config.inference_model, name, value)
        engine = build_engine(config, CPU, (told if told is not None else []).append)
        assert isinstance(engine, VllmRayEngine)
        return engine

    return make


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., VllmRayEngine]) -> Iterator[VllmRayEngine]:
    engine = make_engine()
    yield engine
    engine.close()


def model_of(folder: Path, seed: int | None = None) -> torch.nn.Module:
    """The folder's model, or one of its shape with other weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def publish(engine: VllmRayEngine, model: torch.nn.Module, version: int) -> float:
    return engine.load_weights(deduplicated_state(model).items(), version)


def requests(*counts: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, tuple(range(100 * index, 100 * index + count)))
        for index, (prompt, count) in enumerate(zip(PROMPTS, counts, strict=False))
    ]


def log_probs_by_hand(model: torch.nn.Module, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]  # (R, V)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


def test_EI_18_a_publish_reaches_prompts_whose_beginning_is_cached(engine: VllmRayEngine, model_folder: Path) -> None:
    """Twice, with a prompt that is in the prefix cache each time: what comes out is what a new engine gives."""
    for version, seed in enumerate((1, 2, 3)):
        model = model_of(model_folder, seed)
        publish(engine, model, version)
        assert engine.policy_version == version
        expected = LocalEngine(model_of(model_folder, seed)).generate(requests(1, 1, 1), GREEDY)
        for _ in range(2):
            actual = engine.generate(requests(1, 1, 1), GREEDY)
            assert [turn.response_ids for [turn] in actual] == [turn.response_ids for [turn] in expected]
        for [mine], [theirs] in zip(actual, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), atol=1e-4, rtol=0)


def test_EI_16_EI_17_samples_carry_the_models_own_log_prob_of_the_sampled_token(
    engine: VllmRayEngine, model_folder: Path
) -> None:
    model = model_of(model_folder, 1)
    publish(engine, model, 10)
    groups = engine.generate(requests(6, 0, 3), WARM)
    assert [len(group) for group in groups] == [6, 0, 3]
    turns = [turn for group in groups for turn in group]
    for turn in turns:
        expected = log_probs_by_hand(model, turn.prompt_ids, turn.response_ids)
        torch.testing.assert_close(torch.tensor(turn.log_probs), expected, atol=1e-4, rtol=0)
        ended = turn.response_ids[-1] == 2
        assert turn.finish_reason == ("stop" if ended else "length")
        assert ended or len(turn.response_ids) == 12
        assert 2 not in turn.response_ids[:-1]
    assert len({turn.response_ids for turn in groups[0]}) > 1
    assert engine.generate(requests(6, 0, 3), WARM) == groups  # the same command twice is the same
    [[one, other]] = engine.generate(requests(2), GREEDY)
    assert one == other


def test_more_prompts_than_fit_into_a_step_are_sampled_all_the_same(engine: VllmRayEngine, model_folder: Path) -> None:
    """400 prompts of 40 tokens, no two with a beginning in common that would be in the prefix cache."""
    publish(engine, model_of(model_folder, 1), 15)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 17, (400, 40), generator=generator).tolist()
    many = [GenerationRequest(tuple(ids), (index, 1000 + index)) for index, ids in enumerate(prompts)]
    short = SamplingParams(temperature=1.0, max_tokens=2, stop_token_ids=())
    turns = engine.generate(many, short)
    assert all(len(turn.response_ids) == 2 for group in turns for turn in group)
    assert engine.generate(many, short) == turns


def test_a_publish_tells_what_changed_and_the_engine_what_it_holds(engine: VllmRayEngine, model_folder: Path) -> None:
    model = model_of(model_folder, 4)
    publish(engine, model, 20)
    held = engine.checksum()
    assert publish(engine, model, 21) == 0
    assert engine.checksum() == held
    next(iter(model.parameters())).data[0, :5] += 1
    total = sum(parameter.numel() for parameter in model.parameters())
    assert publish(engine, model, 22) == pytest.approx(5 / total)
    assert engine.checksum() != held


def test_weights_that_leave_something_out_are_refused_by_name(engine: VllmRayEngine, model_folder: Path) -> None:
    model = model_of(model_folder, 5)
    publish(engine, model, 30)
    held = engine.checksum()
    state = {name: tensor for name, tensor in deduplicated_state(model).items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(ComponentError, match=r"up_proj|gate_up_proj"):
        engine.load_weights(state.items(), 31)
    publish(engine, model, 32)  # the next complete publish mends it
    assert engine.policy_version == 32
    assert engine.checksum() == held


def test_the_canary_finds_an_engine_that_computes_something_else(engine: VllmRayEngine, model_folder: Path) -> None:
    model = model_of(model_folder, 6)
    publish(engine, model, 40)
    policy = Policy("tiny", model, torch.float32)
    canary = Canary(policy, engine, PROMPTS, tolerance=1e-3)
    assert canary.check(40) < 1e-4
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(WeightSyncError, match="canary_tolerance"):
        canary.check(40)


def test_replicas_that_are_killed_or_hang_come_back_with_the_current_weights(
    make_engine: Callable[..., VllmRayEngine], model_folder: Path
) -> None:
    """SIGKILL in the middle of a call, SIGSTOP before one; the samples are those of an undisturbed engine. One more is
    one too many."""
    told: list[str] = []
    engine = make_engine(told, max_restarts=2, num_devices=2, time_limit_s=20.0)
    try:
        publish(engine, model_of(model_folder, 7), 1)
        held, expected = engine.checksum(), engine.generate(requests(4, 4, 4, 4), WARM)

        many = [GenerationRequest(PROMPTS[index % 4], tuple(range(64))) for index in range(64)]
        killer = Timer(0.5, os.kill, (engine.replica_pids[0], signal.SIGKILL))
        killer.start()
        turns = engine.generate(many, WARM)
        killer.join()
        assert [len(group) for group in turns] == [64] * 64
        assert engine.restarts == 1
        assert "replica 0" in told[0] and "generate" in told[0]
        assert engine.checksum() == held
        assert engine.policy_version == 1

        stopped = engine.replica_pids[1]
        os.kill(stopped, signal.SIGSTOP)
        assert engine.generate(requests(4, 4, 4, 4), WARM) == expected
        assert "did not answer within 20 s" in told[1]
        assert not psutil.pid_exists(stopped)
        assert engine.checksum() == held

        os.kill(engine.replica_pids[0], signal.SIGKILL)
        with pytest.raises(ComponentError, match=r"max_restarts=2 is the most"):
            engine.generate(requests(1, 1), GREEDY)
    finally:
        engine.close()


def test_EI_42_a_replica_that_sees_too_few_gpus_says_so(local_ray: None, config: RunConfig) -> None:
    from dataclasses import replace

    from expert_iteration.engines.vllm.replica import VllmReplica
    from expert_iteration.runtime.engines import vllm_settings

    settings = replace(vllm_settings(config, CPU), num_gpus=2)
    replica = ray.remote(num_cpus=0)(VllmReplica).remote(settings)
    with pytest.raises(ray.exceptions.RayError, match=r"needs 2 GPUs and its process sees 0"):
        ray.get(replica.info.remote(), timeout=60)
