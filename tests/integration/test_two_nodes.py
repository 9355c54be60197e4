"""Two Ray nodes on this machine, started as one would start them on two; replicas on both."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from expert_iteration.config.loader import load
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import UserError
from expert_iteration.runtime.engines import build_engine
from expert_iteration.types import GenerationRequest, SamplingParams
from tests.tiny import save_tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it for the CPU")
ray = pytest.importorskip("ray", reason="ray is not installed")

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head node and another one, each with one CPU; left and ended afterwards."""
    folder = tempfile.mkdtemp(prefix="ray-")  # paths of Ray's sockets must not be long
    binary, address = str(Path(sys.executable).parent / "ray"), f"127.0.0.1:{free_port()}"
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    common = ["--block", "--num-cpus=1", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
    head = [f"--port={address.rpartition(':')[2]}", "--head", "--include-dashboard=false", f"--temp-dir={folder}"]
    nodes = []
    try:
        for own in (head, [f"--address={address}"]):
            command = [binary, "start", *own, *common]
            nodes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            time.sleep(5)
            assert nodes[-1].poll() is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            yield address
            ray.shutdown()
    finally:
        started = [child for node in nodes for child in psutil.Process(node.pid).children(recursive=True)]
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(60)
        _, left = psutil.wait_procs(started, timeout=40)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left


@pytest.fixture
def make_config(address: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    model = save_tiny_model(tmp_path_factory.mktemp("m"), hidden_size=64, num_attention_heads=2, num_key_value_heads=1)

    def make(*more: str) -> RunConfig:
        overrides = [
            f"model.name={model}",
            "model.chat_template=plain",
            "inference_model.backend=vllm",
            "inference_model.enforce_eager=true",
            "inference_model.kv_cache_gib=0.1",
            "inference_model.time_limit_s=200",
            f"ray.init_config.address='{address}'",
        ]
        return load([*overrides, *more], config_dir=ROOT / "config", config_name="ei_gsm8k")

    return make


def test_replicas_run_on_both_nodes_and_load_what_is_published(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config("inference_model.num_devices=2", f"inference_model.weight_folder={tmp_path}")
    engine = build_engine(config, torch.device("cpu"), print)
    try:
        nodes = {info["NodeID"] for info in ray.nodes() if info["Alive"]}
        [group] = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
        assert set(group["bundles_to_node_id"].values()) == nodes
        assert len(nodes) == 2
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(config.model.name)
        engine.load_weights(model.state_dict().items(), 1)
        assert list(tmp_path.rglob("version_000001.safetensors"))
        requests = [GenerationRequest((3, 4, index), (index,)) for index in range(4)]
        greedy = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=())
        turns = engine.generate(requests, greedy)
        for request, [turn] in zip(requests, turns, strict=True):
            expected = model.generate(
                torch.tensor([request.prompt_ids]), max_new_tokens=6, min_new_tokens=6, do_sample=False
            )
            assert turn.response_ids == tuple(expected[0, 3:].tolist())
    finally:
        engine.close()
    assert not list(tmp_path.iterdir())


def test_EI_42_what_the_cluster_does_not_have_is_told_with_asked_and_available(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from expert_iteration.runtime.ray import placement

    monkeypatch.setattr(placement, "RESERVE_LIMIT_S", 3.0)
    config = make_config("inference_model.num_devices=60")
    with pytest.raises(UserError, match=r"asks the Ray cluster for 60 CPU, and after 3 s it has 2 CPU \(2 free\)"):
        build_engine(config, torch.device("cpu"), print)
