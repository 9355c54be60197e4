"""The in-process engine: any decoder-only transformers model, on the device and in the dtype that it is given in.

The samples asked for are cut into waves of at most `max_sequences`. A wave prefills each of its prompts once, copies
the keys and values to all samples of the prompt, and decodes all samples together, one token each per step. Samples
that have ended leave the batch as soon as that saves more than it costs.

Shapes: B sequences that are decoded together, P columns of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from expert_iteration.engines.checksum import canonical_names, deduplicated_state, weights_checksum
from expert_iteration.engines.kv_cache import DecodeCache
from expert_iteration.engines.sampling import sample_tokens, uniforms
from expert_iteration.errors import ComponentError, WeightSyncError
from expert_iteration.log_probs import gather_log_probs, position_ids
from expert_iteration.types import FinishReason, GenerationRequest, SamplingParams, Turn

PREFILL_TOKENS = 8192
"""Most prompt tokens, padding included, of one forward pass; bounds its activations."""

COMPACTION_SHARE = 7 / 8
"""Ended sequences leave the batch when at most this share still runs: dropping them copies the cache of the others."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """One sample of one request."""

    prompt_ids: tuple[int, ...]
    seed: int
    request: int
    position: int
    """Place among the samples of its request."""


@dataclass(slots=True)
class _DecodeBatch:
    """The sequences of a wave that are still decoded, and what the next step needs of each."""

    rows: Tensor
    """(B,) int64, place in the wave."""
    prompt_mask: Tensor
    """(B, P) bool, false on padding."""
    prompt_lengths: Tensor
    """(B,) int64."""
    cache: DecodeCache

    def keep(self, kept: Tensor) -> None:
        """Drops all sequences but `kept`."""
        self.rows = self.rows[kept]
        self.prompt_mask = self.prompt_mask[kept]
        self.prompt_lengths = self.prompt_lengths[kept]
        self.cache.keep(kept)


class LocalEngine:
    """Generates with `model`, which from then on belongs to the engine.

    Args:
        model: a causal language model of transformers. It is set to eval mode and its gradients are switched off.
        max_sequences: most sequences in flight; None is no bound.
        max_cached_tokens: most tokens whose keys and values are held at a time, over all sequences in flight; None is
            no bound. A sequence that needs more than that on its own runs alone.
        max_model_len: most tokens of prompt and response together; None is what the model's config says.

    Raises:
        ValueError: a length that the model's config does not allow, or floating-point weights of several types, of
            which no single cast of the trained weights could be the image.
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
        dtypes = {tensor.dtype for tensor in deduplicated_state(model).values() if tensor.is_floating_point()}
        if len(dtypes) != 1:
            raise ValueError(f"floating-point weights of one type are needed, found {sorted(map(str, dtypes))}")

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
        samples = [
            _Sample(request.prompt_ids, seed, index, position)
            for index, request in enumerate(requests)
            for position, seed in enumerate(request.seeds)
        ]
        # Prompts of like length share a wave, so that little is padded; sorting is stable and keeps groups together.
        samples.sort(key=lambda sample: len(sample.prompt_ids))
        turns: dict[tuple[int, int], Turn] = {}
        with self._lock, torch.no_grad():
            for wave in self._waves(samples, sampling.max_tokens):
                for sample, turn in zip(wave, self._generate_wave(wave, sampling), strict=True):
                    turns[sample.request, sample.position] = turn
        return [
            [turns[index, position] for position in range(len(request.seeds))] for index, request in enumerate(requests)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies `weights` into the model, cast to its dtype, and takes over `version`.

        Names are those of the model's state dict: all parameters and persistent buffers. Of tied weights one name is
        enough. Nothing is changed unless everything fits.

        Raises:
            WeightSyncError: names that are missing, unknown, given twice or misshapen, all of them listed.
        """
        received = list(weights)
        problems = _weight_problems(received, self._model)
        if problems:
            raise WeightSyncError(f"weights of version {version} do not fit the engine's model: {'; '.join(problems)}")
        state = self._model.state_dict()
        with self._lock, torch.no_grad():
            for name, tensor in received:
                state[name].copy_(tensor)
            self._policy_version = version

    def changed_share(self, weights: Mapping[str, Tensor]) -> float:
        """Share of the weights in [0, 1] that loading `weights` would change, after the cast to the engine's dtype.

        What `load_weights` would refuse is left out.
        """
        state = self._model.state_dict()
        pairs = [
            (state[name], tensor)
            for name, tensor in weights.items()
            if name in state and state[name].shape == tensor.shape
        ]
        changed = sum(int((held != tensor.to(held)).sum()) for held, tensor in pairs)
        return changed / max(1, sum(held.numel() for held, _ in pairs))

    def checksum(self) -> str:
        """`weights_checksum` of the weights that it holds now, tied ones once."""
        return weights_checksum(deduplicated_state(self._model).items())

    def _check_lengths(self, requests: Sequence[GenerationRequest], max_tokens: int) -> None:
        for index, request in enumerate(requests):
            length = len(request.prompt_ids)
            if length == 0:
                raise ValueError(f"request {index}: the prompt is empty")
            if length + max_tokens > self._max_model_len:
                raise ValueError(
                    f"request {index}: {length} prompt tokens and {max_tokens} more exceed {self._max_model_len}"
                )

    def _waves(self, samples: Sequence[_Sample], max_tokens: int) -> Iterator[Sequence[_Sample]]:
        """Cuts samples, sorted by prompt length, into runs within both bounds; each takes the room of the longest."""
        start = 0
        for end in range(1, len(samples) + 1):
            if end == len(samples) or not self._fits(end + 1 - start, len(samples[end].prompt_ids) + max_tokens):
                yield samples[start:end]
                start = end

    def _fits(self, num_sequences: int, tokens_each: int) -> bool:
        return (self._max_sequences is None or num_sequences <= self._max_sequences) and (
            self._max_cached_tokens is None or num_sequences * tokens_each <= self._max_cached_tokens
        )

    def _generate_wave(self, samples: Sequence[_Sample], sampling: SamplingParams) -> list[Turn]:
        uniform = uniforms([sample.seed for sample in samples], sampling.max_tokens)
        batch, logits = self._prefill(samples, sampling.max_tokens)
        ids, log_probs = self._decode(batch, logits, uniform.to(logits.device), sampling)
        return [
            _turn(sample, sample_ids, sample_log_probs, sampling)
            for sample, sample_ids, sample_log_probs in zip(samples, ids.tolist(), log_probs.tolist(), strict=True)
        ]

    def _prefill(self, samples: Sequence[_Sample], max_tokens: int) -> tuple[_DecodeBatch, Tensor]:
        """The batch after its prompts, and the logits of each sequence's first token, (B, V).

        `samples` come sorted by prompt length, with the samples of a prompt next to each other.
        """
        device = self._model.device
        counts = Counter(sample.request for sample in samples)  # in the order of the samples, as `prompts` is
        prompts = list({sample.request: sample.prompt_ids for sample in samples}.values())
        owners = torch.arange(len(prompts)).repeat_interleave(torch.tensor(list(counts.values()))).to(device)  # (B,)

        num_columns = len(prompts[-1])
        cache = DecodeCache(
            num_layers=self._model.config.get_text_config().num_hidden_layers,
            num_sequences=len(samples),
            prompt_columns=num_columns,
            capacity=num_columns + max_tokens - 1,  # the last token sampled is never fed back
        )
        all_logits: list[Tensor] = []
        first_row = 0
        for chunk in _prefill_chunks(prompts):
            ids, mask = _pad_left(prompts[chunk], device)
            prompt_cache = DynamicCache()
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position_ids(mask),
                past_key_values=prompt_cache,
                use_cache=True,
                logits_to_keep=1,  # padding is on the left, so the last column is the last token of every prompt
            ).logits[:, -1]  # (prompts of the chunk, V)
            source = owners[(owners >= chunk.start) & (owners < chunk.stop)] - chunk.start
            cache.write_prompts(first_row, prompt_cache, source)
            all_logits.append(logits[source])
            first_row += len(source)

        lengths = torch.tensor([len(sample.prompt_ids) for sample in samples], device=device)
        columns = torch.arange(num_columns, device=device)
        batch = _DecodeBatch(
            rows=torch.arange(len(samples), device=device),
            prompt_mask=columns >= num_columns - lengths.unsqueeze(-1),
            prompt_lengths=lengths,
            cache=cache,
        )
        return batch, torch.cat(all_logits)

    def _decode(
        self, batch: _DecodeBatch, logits: Tensor, uniform: Tensor, sampling: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Ids and log-probs, both (B, max_tokens); what stands after a row's first stop token means nothing."""
        ids = torch.zeros(uniform.shape, dtype=torch.int64, device=uniform.device)
        log_probs = torch.zeros_like(uniform)
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=uniform.device)
        running = torch.ones_like(batch.rows, dtype=torch.bool)
        for step in range(sampling.max_tokens):
            tokens = sample_tokens(logits, uniform[batch.rows, step], sampling)  # (B,)
            ids[batch.rows, step] = tokens
            log_probs[batch.rows, step] = gather_log_probs(logits, tokens)
            running &= ~torch.isin(tokens, stop_ids)
            num_running = int(running.sum())
            if num_running == 0 or step + 1 == sampling.max_tokens:
                break
            if num_running <= COMPACTION_SHARE * len(running):
                kept = running.nonzero().squeeze(-1)
                batch.keep(kept)
                tokens, running = tokens[kept], running[kept]
            logits = self._decode_step(batch, tokens, step)
        return ids, log_probs

    def _decode_step(self, batch: _DecodeBatch, tokens: Tensor, step: int) -> Tensor:
        """Feeds each sequence's token number `step`; the logits of the next, (B, V)."""
        response_mask = batch.prompt_mask.new_ones(len(tokens), step + 1)
        return self._model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=torch.cat([batch.prompt_mask, response_mask], dim=-1),
            position_ids=(batch.prompt_lengths + step).unsqueeze(-1),
            past_key_values=batch.cache,
            use_cache=True,
        ).logits[:, -1]


def _max_model_len(model: PreTrainedModel, wanted: int | None) -> int:
    allowed: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is None and allowed is None:
        raise ValueError("the model's config has no max_position_embeddings: max_model_len has to be given")
    if wanted is not None and allowed is not None and wanted > allowed:
        raise ValueError(f"max_model_len={wanted}: the model has positions for {allowed} tokens")
    length = wanted if wanted is not None else allowed
    assert length is not None
    return length


def _prefill_chunks(prompts: Sequence[tuple[int, ...]]) -> Iterator[slice]:
    """Cuts prompts, sorted by length, into runs that take at most PREFILL_TOKENS with padding, or are one prompt."""
    start = 0
    for end in range(1, len(prompts) + 1):
        if end == len(prompts) or (end + 1 - start) * len(prompts[end]) > PREFILL_TOKENS:
            yield slice(start, end)
            start = end


def _pad_left(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, both (B, P): int64, and bool that is true on the prompt."""
    num_columns = max(map(len, prompts))
    ids = torch.zeros(len(prompts), num_columns, dtype=torch.int64)
    mask = torch.zeros(len(prompts), num_columns, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, num_columns - len(prompt) :] = torch.tensor(prompt)
        mask[row, num_columns - len(prompt) :] = True
    return ids.to(device), mask.to(device)


def _turn(sample: _Sample, ids: list[int], log_probs: list[float], sampling: SamplingParams) -> Turn:
    """Cuts a row of the wave after its first stop token."""
    ends = [index for index, token in enumerate(ids) if token in sampling.stop_token_ids]
    finish_reason: FinishReason = "stop" if ends else "length"
    length = ends[0] + 1 if ends else len(ids)
    response_log_probs = tuple(log_probs[:length])
    if not all(map(math.isfinite, response_log_probs)):
        raise ComponentError(
            f"the model gave the log-probabilities {response_log_probs}: its weights or inputs are broken"
        )
    return Turn(sample.prompt_ids, tuple(ids[:length]), response_log_probs, finish_reason)


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
