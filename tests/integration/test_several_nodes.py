"""Ray nodes on this machine, started as one would start them on several; replicas on two of them."""

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
from transformers import AutoModelForCausalLM

from expert_iteration.config.loader import load
from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import ComponentError, UserError
from expert_iteration.runtime.engines import build_engine
from expert_iteration.types import GenerationRequest, SamplingParams
from tests.tiny import save_tiny_model

pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it for the CPU")
ray = pytest.importorskip("ray", reason="ray is not installed")
from expert_iteration.runtime.ray import placement  # noqa: E402  # it imports ray

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A head node and `num_others` more, each with one CPU, as one would start them on machines of their own."""

    def __init__(self, num_others: int) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = tempfile.mkdtemp(prefix="ray-")  # paths of Ray's sockets must not be long
        self._nodes: list[subprocess.Popen[bytes]] = []
        head = [f"--port={self.address.rpartition(':')[2]}", "--head", "--include-dashboard=false"]
        self._start("127.0.0.1", *head, f"--temp-dir={self._folder}")
        for number in range(num_others):
            self._start(f"127.0.0.{number + 2}", f"--address={self.address}")

    def _start(self, ip: str, *own: str) -> None:
        common = ["--block", "--num-cpus=1", f"--node-ip-address={ip}", "--object-store-memory=80000000"]
        command = [str(Path(sys.executable).parent / "ray"), "start", *own, *common]
        environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        null = subprocess.DEVNULL
        self._nodes.append(subprocess.Popen(command, env=environment, stdout=null, stderr=null))
        time.sleep(5)
        assert self._nodes[-1].poll() is None

    def wait_until_all_are_in(self) -> None:
        """A node belongs to the cluster some seconds after it has started, on a busy machine many."""
        ray.init(address=self.address, log_to_driver=False)
        deadline = time.monotonic() + 120
        while (alive := sum(node["Alive"] for node in ray.nodes())) < len(self._nodes):
            assert time.monotonic() < deadline, f"{alive} of {len(self._nodes)} nodes"
            time.sleep(0.5)
        ray.shutdown()

    def leave(self, node_id: str) -> None:
        """Ends a node."""
        [ip] = [info["NodeManagerAddress"] for info in ray.nodes() if info["NodeID"] == node_id]
        number = int(ip.rpartition(".")[2]) - 1
        assert number > 0  # the head is the cluster
        self._nodes[number].terminate()
        self._nodes[number].wait(60)

    def close(self) -> None:
        """Ends all nodes; afterwards none of their processes is left."""
        started = [
            child
            for node in self._nodes
            if node.poll() is None
            for child in psutil.Process(node.pid).children(recursive=True)
        ]
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            node.wait(60)
        _, left = psutil.wait_procs(started, timeout=40)
        shutil.rmtree(self._folder, ignore_errors=True)
        assert not left


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(num_others=2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            cluster.wait_until_all_are_in()
            yield cluster
            ray.shutdown()
    finally:
        cluster.close()


@pytest.fixture
def make_config(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    model = save_tiny_model(tmp_path_factory.mktemp("m"), hidden_size=64, num_attention_heads=2, num_key_value_heads=1)

    def make(*more: str) -> RunConfig:
        overrides = [
            f"model.name={model}",
            "model.chat_template=plain",
            "inference_model.backend=vllm",
            "inference_model.enforce_eager=true",
            "inference_model.kv_cache_gib=0.1",
            "inference_model.time_limit_s=200",
            f"ray.init_config.address='{cluster.address}'",
        ]
        return load([*overrides, *more], config_dir=ROOT / "config", config_name="ei_gsm8k")

    return make


def nodes_of_replicas() -> dict[int, str]:
    """Node of each replica."""
    [group] = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    return dict(group["bundles_to_node_id"])


def test_EI_42_what_the_cluster_does_not_have_is_told_with_asked_and_available(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "RESERVE_LIMIT_S", 3.0)
    config = make_config("inference_model.num_devices=60")
    with pytest.raises(UserError, match=r"asks the Ray cluster for 60 CPU, and after 3 s it has 3 CPU \(3 free\)"):
        build_engine(config, torch.device("cpu"), print)


def test_replicas_run_on_two_nodes_until_there_are_too_few(
    cluster: Cluster, make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A third node takes over the replica of one that leaves; when the next one leaves, that is told."""
    config = make_config("inference_model.num_devices=2", f"inference_model.weight_folder={tmp_path}")
    model = AutoModelForCausalLM.from_pretrained(config.model.name)
    requests = [GenerationRequest((3, 4, index), (index,)) for index in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=())

    def generates_the_models_own() -> bool:
        for request, [turn] in zip(requests, engine.generate(requests, greedy), strict=True):
            expected = model.generate(
                torch.tensor([request.prompt_ids]), max_new_tokens=6, min_new_tokens=6, do_sample=False
            )
            assert turn.response_ids == tuple(expected[0, 3:].tolist())
        return True

    def leave_one() -> int:
        """Ends a node with a replica, and neither the head nor this process's, and tells which replica it was."""
        [head] = [info["NodeID"] for info in ray.nodes() if "node:__internal_head__" in info["Resources"]]
        protected = {head, ray.get_runtime_context().get_node_id()}
        index, node = next((index, node) for index, node in nodes_of_replicas().items() if node not in protected)
        cluster.leave(node)
        return index

    engine = build_engine(config, torch.device("cpu"), print)
    try:
        assert len(set(nodes_of_replicas().values())) == 2
        engine.load_weights(model.state_dict().items(), 1)
        assert list(tmp_path.rglob("version_000001.safetensors"))
        assert generates_the_models_own()

        before = nodes_of_replicas()
        index = leave_one()
        assert generates_the_models_own()
        assert engine.restarts == 1
        assert nodes_of_replicas()[index] not in before.values()

        monkeypatch.setattr(placement, "RESERVE_LIMIT_S", 3.0)
        leave_one()
        with pytest.raises(
            ComponentError, match=r"lost a node, and 3 s later it has 1 CPU \(0 free\): too little for 2"
        ):
            engine.generate(requests, greedy)
    finally:
        engine.close()
    assert not list(tmp_path.iterdir())


def test_another_cluster_on_the_machine_is_not_used(cluster: Cluster) -> None:
    """Without ray.init_config.address a run starts one of its own."""
    code = "from expert_iteration.runtime.ray import cluster; import ray; cluster.start({}); print(len(ray.nodes()))"
    folder = tempfile.mkdtemp(prefix="ray-")
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "RAY_TMPDIR": folder}
    command = [sys.executable, "-c", code]
    output = subprocess.check_output(command, env=environment, cwd=ROOT, text=True, timeout=120)
    shutil.rmtree(folder)
    assert output.strip() == "1"
