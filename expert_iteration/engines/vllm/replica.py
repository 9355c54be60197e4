"""One vLLM engine. It is made for an actor: plain arguments and results, no tensors, calls from several threads.

Nothing may be under way while weights are replaced; who publishes sees to that (engine_gate.py). A publish:

    load      all weights, into every worker
    reset     the prefix cache, whose keys and values belong to the old weights
    count     the version, which is that of the weights from then on
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from expert_iteration.engines.vllm.engine_thread import EngineThread
from expert_iteration.errors import ComponentError, WeightSyncError
from expert_iteration.types import FinishReason, GenerationRequest, SamplingParams, Turn

WORKER_EXTENSION = "expert_iteration.engines.vllm.worker.WeightLoading"
MAX_SEED = 2**63
"""vLLM's seeds are signed 64-bit numbers."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a replica is built from."""

    model: str
    """Folder, or name on the hub."""
    dtype: str
    """`float32` or `bfloat16`."""
    seed: int
    num_gpus: int
    """Tensor-parallel GPUs; 0 runs on the CPU."""
    gpu_memory_utilization: float
    """Share of a GPU's memory that vLLM may take, weights included."""
    kv_cache_bytes: int | None
    """Memory for keys and values; None is what gpu_memory_utilization leaves."""
    max_sequences: int | None
    enforce_eager: bool
    quantization: str | None
    trust_remote_code: bool
    max_model_len: int | None
    local_files_only: bool


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica says of itself once it runs."""

    pid: int
    max_model_len: int
    num_visible_gpus: int


class VllmReplica:
    """A vLLM engine with the version of its weights."""

    def __init__(self, settings: VllmSettings) -> None:
        if settings.local_files_only:
            os.environ["HF_HUB_OFFLINE"] = "1"
        import torch

        self._num_visible_gpus = torch.cuda.device_count()
        if self._num_visible_gpus < settings.num_gpus:
            raise ComponentError(
                f"the engine needs {settings.num_gpus} GPUs and its process sees {self._num_visible_gpus} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
            )
        self._engine = EngineThread(partial(_build, settings))
        self._policy_version = -1
        self._checksum = ""
        self._fingerprints: list[str] = []

    def info(self) -> ReplicaInfo:
        """Process, context length and GPUs."""
        max_model_len = self._engine.call(lambda llm: llm.llm_engine.model_config.max_model_len)
        return ReplicaInfo(os.getpid(), max_model_len, self._num_visible_gpus)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Turn]]:
        """One list per request with one turn per seed.

        The samples of a prompt are drawn from one seed, the request's first, counted up; at temperature 0 they are all
        the same and one is generated.

        Raises:
            ComponentError: a log-prob is NaN or infinite, or vLLM gave another number of samples than asked for.
        """
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = sampling.temperature == 0
        asked = [request for request in requests if request.seeds]
        params = [
            VllmSamplingParams(
                n=1 if greedy else len(request.seeds),
                seed=request.seeds[0] % MAX_SEED,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # what ends a response is said by stop_token_ids alone
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for request in asked
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in asked]
        outputs = iter(self._engine.generate(prompts, params))
        turns = []
        for request in requests:
            of_request = [_turn(request, each, sampling) for each in next(outputs).outputs] if request.seeds else []
            if greedy:
                of_request *= len(request.seeds)
            if len(of_request) != len(request.seeds):
                raise ComponentError(f"vLLM gave {len(of_request)} samples where {len(request.seeds)} were asked for")
            turns.append(of_request)
        return turns

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token | tokens before it) at temperature 1 of every token but the first, for each sequence.

        The prefix cache takes no part in it.
        """
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = VllmSamplingParams(
            temperature=0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompts = [{"prompt_token_ids": list(ids)} for ids in sequences]
        outputs = self._engine.generate(prompts, [params] * len(prompts))
        return [
            [log_prob_of(token, entry) for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    def load(self, path: str, version: int, checksum: str) -> None:
        """Replaces every weight by those of a published file and takes over `version`.

        Raises:
            WeightSyncError: what was read is not what was written, parameters were left out, or the prefix cache could
                not be emptied.
        """
        if self._engine.num_under_way > 0:
            raise WeightSyncError(f"weights of version {version} came while {self._engine.num_under_way} requests ran")
        for read, missing in self._on_workers("load_published", path):
            if read != checksum:
                raise WeightSyncError(
                    f"the engine read weights with the checksum {read[:16]} from {path}, {checksum[:16]} was written"
                )
            if missing:
                raise WeightSyncError(
                    f"weights of version {version} left out {len(missing)} parameters of the engine's model: "
                    f"{', '.join(missing)}"
                )
        if not self._engine.call(lambda llm: llm.reset_prefix_cache()):
            raise WeightSyncError(f"the engine could not empty its prefix cache for weights of version {version}")
        self._fingerprints = self._on_workers("weights_fingerprint")
        self._checksum = checksum
        self._policy_version = version

    def holds(self) -> tuple[int, str]:
        """Version of the weights and the checksum of the file that they came from.

        Raises:
            WeightSyncError: the weights are no longer what was loaded.
        """
        if self._on_workers("weights_fingerprint") != self._fingerprints:
            raise WeightSyncError(f"the engine's weights of version {self._policy_version} changed after they loaded")
        return self._policy_version, self._checksum

    def _on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Answers of vLLM's workers, of which there is one for each GPU."""
        answers: list[Any] = self._engine.call(lambda llm: llm.collective_rpc(method, args=arguments))
        return answers


def _build(settings: VllmSettings) -> Any:
    """The `vllm.LLM`."""
    from vllm import LLM

    optional: dict[str, Any] = {
        "max_num_seqs": settings.max_sequences,
        "max_model_len": settings.max_model_len,
        "quantization": settings.quantization,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        # A prompt that is computed in parts draws a token in vain and winds its generator back, which a CPU's cannot.
        "enable_chunked_prefill": None if settings.num_gpus else False,
        # The prefix cache shares whole blocks. vLLM's are of 128 tokens on a CPU, so the samples of a prompt shorter
        # than that would each compute it again; 32 is the least that its attention there takes.
        "block_size": None if settings.num_gpus else 32,
    }
    return LLM(
        model=settings.model,
        dtype=settings.dtype,
        seed=settings.seed,
        tensor_parallel_size=max(1, settings.num_gpus),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        trust_remote_code=settings.trust_remote_code,
        skip_tokenizer_init=True,  # ids in, ids out
        generation_config="vllm",  # not what the model's folder says about sampling
        enable_prefix_caching=True,
        logprobs_mode="raw_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        **{name: value for name, value in optional.items() if value is not None},
    )


def log_prob_of(token: int, entry: Mapping[int, Any] | None) -> float:
    """The token's log-prob in what vLLM gives for one position: a mapping from ids, in which it is looked up by its id
    and never by its place; NaN where there is nothing."""
    if entry is None or token not in entry:
        return math.nan
    return float(entry[token].logprob)


def _turn(request: GenerationRequest, completion: Any, sampling: SamplingParams) -> Turn:
    ids = tuple(completion.token_ids)
    log_probs = tuple(log_prob_of(token, entry) for token, entry in zip(ids, completion.logprobs, strict=True))
    if not all(map(math.isfinite, log_probs)):
        raise ComponentError(f"vLLM gave the log-probabilities {log_probs}: the weights or inputs are broken")
    finish_reason: FinishReason = "stop" if ids and ids[-1] in sampling.stop_token_ids else "length"
    return Turn(request.prompt_ids, ids, log_probs, finish_reason)
