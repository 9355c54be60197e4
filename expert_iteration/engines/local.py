"""The in-process engine: any decoder-only transformers model whose attention goes through transformers' interface.

A prompt is computed once, whatever the number of its samples, and what all prompts of a call begin with once for all of
them. Samples are decoded together, one token each per step; those that end leave and waiting ones join.

    local.py             requests -> runs of prompts, turns; weights and their version
    slots.py             bounds -> slots for prompts and samples
    continuous.py        the batch: admit, step, retire
    shared_attention.py  what a step computes
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expert_iteration.engines.checksum import canonical_names, deduplicated_state, weights_checksum
from expert_iteration.engines.continuous import ContinuousBatch, Sample, compute_prefix
from expert_iteration.engines.shared_attention import shared_attention
from expert_iteration.engines.shared_check import check_shared_attention
from expert_iteration.engines.slots import cut_runs, plan_slots
from expert_iteration.errors import ComponentError, WeightSyncError
from expert_iteration.types import FinishReason, GenerationRequest, SamplingParams, Turn

COPIED_ELEMENTS = 2**18
CLOSE_LIMIT_S = 10.0


class LocalEngine:
    """Generates with `model`, which from then on belongs to the engine.

    Args:
        model: a causal language model of transformers. It is set to eval mode and its gradients are switched off.
        max_sequences: most sequences in flight; None is no bound.
        max_cached_tokens: most tokens whose keys and values are held at a time, over all sequences in flight and their
            prompts; None is no bound. A sequence that needs more than that on its own runs alone.
        max_model_len: most tokens of prompt and response together; None is what the model's config says.

    Raises:
        ValueError: a length that the model's config does not allow; floating-point weights of several types, of which
            no single cast of the trained weights could be the image; an attention that the engine cannot share.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sequences: int | None = None,
        max_cached_tokens: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences={max_sequences}: at least 1")
        self._model = model.eval().requires_grad_(False)
        self._max_sequences = max_sequences
        self._max_cached_tokens = max_cached_tokens
        self._max_model_len = _max_model_len(model, max_model_len)
        self._policy_version = 0
        # Weights that change in the middle of a generation would belong to no version.
        self._lock = threading.Lock()
        self._closed = False
        dtypes = {tensor.dtype for tensor in deduplicated_state(model).values() if tensor.is_floating_point()}
        if len(dtypes) != 1:
            raise ValueError(f"floating-point weights of one type are needed, found {sorted(map(str, dtypes))}")
        check_shared_attention(self._model)

    @property
    def policy_version(self) -> int:
        """Version of the weights that it holds; 0 are those that it was built with."""
        return self._policy_version

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self._max_model_len

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights."""
        return self._model.dtype

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[list[Turn]]:
        """One list per request with one turn per seed, in the order asked for.

        The draws of a sample depend on its own seed only, and torch's global generator is neither read nor moved. The
        same call gives the same turns; in another company a sample's logits may differ in the last bits.

        Raises:
            ValueError: an empty prompt, or one that leaves less room than `sampling.max_tokens`.
            ComponentError: the model gave NaN or infinite log-probabilities.
        """
        self._check_lengths(requests, sampling.max_tokens)
        samples = [[Sample(index, seed) for seed in request.seeds] for index, request in enumerate(requests)]
        with self._lock, torch.no_grad(), shared_attention(self._model):
            self._generate(requests, samples, sampling)
        return [
            [_turn(request.prompt_ids, sample, sampling) for sample in of_request]
            for request, of_request in zip(requests, samples, strict=True)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Copies `weights` into the model, cast to its dtype, and takes over `version`.

        Names are those of the model's state dict: all parameters and persistent buffers. Of tied weights one name is
        enough. Nothing is changed unless everything fits.

        Returns:
            The share of the weights in [0, 1] that are not what they were before.

        Raises:
            WeightSyncError: names that are missing, unknown, given twice or misshapen, all of them listed.
        """
        received = list(weights)
        problems = _weight_problems(received, self._model)
        if problems:
            raise WeightSyncError(f"weights of version {version} do not fit the engine's model: {'; '.join(problems)}")
        state = self._model.state_dict()
        with self._lock, torch.no_grad():
            changed = sum(_replace(state[name], tensor) for name, tensor in received)
            self._policy_version = version
        return changed / max(1, sum(tensor.numel() for _, tensor in received))

    def checksum(self) -> str:
        """`weights_checksum` of the weights that it holds now, tied ones once."""
        return weights_checksum(deduplicated_state(self._model).items())

    def held_weights(self) -> dict[str, Tensor]:
        """The model's own tensors, tied ones once."""
        return deduplicated_state(self._model)

    def close(self) -> None:
        """Ends generations in other threads, at their next step, and waits for them."""
        self._closed = True
        if self._lock.acquire(timeout=CLOSE_LIMIT_S):
            self._lock.release()

    def _check_lengths(self, requests: Sequence[GenerationRequest], max_tokens: int) -> None:
        for index, request in enumerate(requests):
            length = len(request.prompt_ids)
            if length == 0:
                raise ValueError(f"request {index}: the prompt is empty")
            if length + max_tokens > self._max_model_len:
                raise ValueError(
                    f"request {index}: {length} prompt tokens and {max_tokens} more exceed {self._max_model_len}"
                )

    def _generate(
        self, requests: Sequence[GenerationRequest], samples: Sequence[Sequence[Sample]], sampling: SamplingParams
    ) -> None:
        """Fills in the samples of each request."""
        # Prompts of like length stand together, so that little is padded.
        order = sorted(
            (index for index, of_request in enumerate(samples) if of_request),
            key=lambda index: len(requests[index].prompt_ids),
        )
        if not order:
            return
        prompts = {index: requests[index].prompt_ids for index in order}
        prefix = compute_prefix(self._model, list(prompts.values()))
        bounds = {"max_sequences": self._max_sequences, "max_cached_tokens": self._max_cached_tokens}
        lengths, counts = [len(prompts[index]) for index in order], [len(samples[index]) for index in order]
        for run in cut_runs(lengths, counts, sampling.max_tokens, **bounds):
            of_run = [sample for index in order[run] for sample in samples[index]]
            plan = plan_slots(lengths[run][-1], len(lengths[run]), len(of_run), sampling.max_tokens, **bounds)
            ContinuousBatch(self._model, prompts, of_run, sampling=sampling, plan=plan, prefix=prefix).run(
                lambda: self._closed
            )


def _replace(held: Tensor, new: Tensor) -> int:
    """Copies `new` over `held` and returns how many elements differed, in parts that fit into a processor's cache."""
    changed = torch.zeros((), dtype=torch.int64, device=held.device)
    parts = zip(held.view(-1).split(COPIED_ELEMENTS), new.reshape(-1).split(COPIED_ELEMENTS), strict=True)
    for old_part, new_part in parts:
        cast = new_part.to(old_part)
        changed += torch.count_nonzero(old_part != cast)
        old_part.copy_(cast)
    return int(changed)


def _max_model_len(model: PreTrainedModel, wanted: int | None) -> int:
    allowed: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is None and allowed is None:
        raise ValueError("the model's config has no max_position_embeddings: max_model_len has to be given")
    if wanted is not None and allowed is not None and wanted > allowed:
        raise ValueError(f"max_model_len={wanted}: the model has positions for {allowed} tokens")
    length = wanted if wanted is not None else allowed
    assert length is not None
    return length


def _turn(prompt_ids: tuple[int, ...], sample: Sample, sampling: SamplingParams) -> Turn:
    finish_reason: FinishReason = "stop" if sample.ids[-1] in sampling.stop_token_ids else "length"
    if not all(map(math.isfinite, sample.log_probs)):
        raise ComponentError(
            f"the model gave the log-probabilities {sample.log_probs}: its weights or inputs are broken"
        )
    return Turn(prompt_ids, tuple(sample.ids), tuple(sample.log_probs), finish_reason)


def _weight_problems(received: Sequence[tuple[str, Tensor]], model: PreTrainedModel) -> list[str]:
    """What keeps `received` from replacing every weight of `model`, one entry per kind of problem."""
    state = model.state_dict()
    canonical = canonical_names(model)
    counts = Counter(name for name, _ in received)
    covered = {canonical[name] for name in counts if name in canonical}
    problems = {
        "missing": [name for name, first in canonical.items() if name == first and name not in covered],
        "unknown": [name for name in counts if name not in state],
        "given twice": [name for name, count in counts.items() if count > 1],
        "misshapen": [
            f"{name} {tuple(tensor.shape)} instead of {tuple(state[name].shape)}"
            for name, tensor in received
            if name in state and tensor.shape != state[name].shape
        ],
    }
    return [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
