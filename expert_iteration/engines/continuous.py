"""Continuous batching: samples that end leave the batch, waiting ones take their place, one token of each per step.

    admit    waiting samples, in order, while slots are free; a prompt is prefilled when its first sample comes
    step     one token of every sample in flight: the first from its prompt's last hidden state, the others by decoding
    retire   samples that have ended; the last ones take their slots, so that the slots in use stay in front

Shapes: B samples in flight, N of them new, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expert_iteration.engines.sampling import draw, uniforms
from expert_iteration.engines.shared_attention import active, decode_step, prefill
from expert_iteration.engines.slot_cache import SlotCache
from expert_iteration.engines.slots import SlotPlan
from expert_iteration.errors import ComponentError
from expert_iteration.log_probs import project
from expert_iteration.packing import common_length
from expert_iteration.types import SamplingParams

T = TypeVar("T")

PREFILL_TOKENS = 8192
"""Most prompt tokens, padding included, of one forward pass; bounds its activations."""
MAX_LOGITS = 2**24
"""Most logits held at a time: the samples in flight are projected onto the vocabulary and drawn in parts."""


@dataclass(slots=True)
class Sample:
    """One response in the making."""

    request: int
    """Index of its request, and so of its prompt."""
    seed: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What all prompts of a call begin with, computed once."""

    cache: SlotCache
    length: int


def compute_prefix(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> Prefix | None:
    """The tokens that all prompts begin with, at least one token short of the shortest; None where there are none."""
    length = common_length(prompts)
    if length == 0:
        return None
    cache = SlotCache(1, length)
    prefill(model, [prompts[0][:length]], cache, [0])
    return Prefix(cache, length)


class ContinuousBatch:
    """Generates all samples of some prompts.

    Args:
        model: whose attention is the shared one.
        prompts: token ids of each prompt, by index.
        samples: to generate, those of a prompt next to each other.
        sampling: how tokens are drawn.
        plan: slots.
        prefix: what all prompts begin with.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Mapping[int, tuple[int, ...]],
        samples: Sequence[Sample],
        *,
        sampling: SamplingParams,
        plan: SlotPlan,
        prefix: Prefix | None,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._sampling = sampling
        self._plan = plan
        self._prefix = prefix
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._waiting = deque(samples)
        self._unfinished = Counter(sample.request for sample in samples)
        self._rows: list[Sample] = []
        """Samples in flight, by slot."""
        self._residents: list[int] = []
        """Prompts whose keys and values are held, by slot."""
        self._prompt_cache = SlotCache(plan.prompts, plan.prompt_columns)
        self._own_cache = SlotCache(plan.samples, plan.own_columns)
        hidden_size = model.config.get_text_config().hidden_size
        self._prompt_hidden = torch.zeros(plan.prompts, hidden_size, dtype=model.dtype, device=model.device)
        self._uniform = torch.zeros(plan.samples, sampling.max_tokens, device=model.device)

    def run(self, is_closed: Callable[[], bool] = lambda: False) -> None:
        """Fills in `ids` and `log_probs` of all samples; raises ComponentError once `is_closed` says so."""
        while self._waiting or self._rows:
            if is_closed():
                raise ComponentError("the engine was closed in the middle of a generation")
            num_running = len(self._rows)
            self._admit()
            self._sample(self._hidden_states(num_running))
            self._retire()

    def _admit(self) -> None:
        """Puts waiting samples into free slots, and prefills the prompts that come with them."""
        first_row, first_resident = len(self._rows), len(self._residents)
        held = set(self._residents)
        while self._waiting and len(self._rows) < self._plan.samples:
            prompt = self._waiting[0].request
            if prompt not in held:
                if len(self._residents) == self._plan.prompts:
                    break
                self._residents.append(prompt)
                held.add(prompt)
            self._rows.append(self._waiting.popleft())
        new = self._rows[first_row:]
        if new:
            drawn = uniforms([sample.seed for sample in new], self._sampling.max_tokens)
            self._uniform[first_row : len(self._rows)] = drawn.to(self._uniform.device)
        self._prefill(range(first_resident, len(self._residents)))

    def _prefill(self, slots: range) -> None:
        start = 0 if self._prefix is None else self._prefix.length
        for part in _prefill_parts([len(self._prompts[self._residents[slot]]) - start for slot in slots]):
            chosen = slots[part]
            self._prompt_hidden[chosen.start : chosen.stop] = prefill(
                self._model,
                [self._prompts[self._residents[slot]][start:] for slot in chosen],
                self._prompt_cache,
                chosen,
                prefix=None if self._prefix is None else self._prefix.cache,
                prefix_length=start,
            )

    def _hidden_states(self, num_running: int) -> Tensor:
        """(B, H), what the next token of each sample in flight is predicted from; the first `num_running` decode."""
        slot_of = {prompt: slot for slot, prompt in enumerate(self._residents)}
        device = self._model.device
        new = torch.tensor([slot_of[sample.request] for sample in self._rows[num_running:]], dtype=torch.int64)
        states = self._prompt_hidden[new.to(device)]  # (N, H)
        running = self._rows[:num_running]
        if not running:
            return states
        lengths = [len(self._prompts[sample.request]) for sample in running]
        columns = [len(sample.ids) - 1 for sample in running]
        step = decode_step(
            self._prompt_cache,
            self._own_cache,
            prompt_lengths=lengths,
            slots=[slot_of[sample.request] for sample in running],
            columns=columns,
            device=device,
        )
        tokens = torch.tensor([[sample.ids[-1]] for sample in running], device=device)  # (B - N, 1)
        positions = (step.prompt_lengths + step.columns).unsqueeze(-1)  # (B - N, 1)
        with active(step):
            decoded = self._model.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False)
        return torch.cat([decoded.last_hidden_state[:, 0], states])

    def _sample(self, hidden: Tensor) -> None:
        """Draws the next token of every sample in flight from (B, H) hidden states."""
        columns = torch.tensor([[len(sample.ids)] for sample in self._rows], device=hidden.device)  # (B, 1)
        uniform = self._uniform[: len(self._rows)].gather(1, columns).squeeze(1)  # (B,)
        most = max(1, MAX_LOGITS // self._model.config.get_text_config().vocab_size)
        ids: list[int] = []
        log_probs: list[float] = []
        for hidden_part, uniform_part in zip(hidden.split(most), uniform.split(most), strict=True):
            drawn, values = draw(project(self._model, hidden_part), uniform_part, self._sampling)
            ids += drawn.tolist()
            log_probs += values.tolist()
        for sample, token, log_prob in zip(self._rows, ids, log_probs, strict=True):
            sample.ids.append(token)
            sample.log_probs.append(log_prob)

    def _retire(self) -> None:
        """Takes out what has ended; what stands last moves into the gaps."""
        ended = [row for row, sample in enumerate(self._rows) if self._has_ended(sample)]
        if not ended:
            return
        self._unfinished.subtract(self._rows[row].request for row in ended)
        _move(self._own_cache, self._uniform, *_close_gaps(self._rows, ended))
        done = [slot for slot, prompt in enumerate(self._residents) if self._unfinished[prompt] == 0]
        _move(self._prompt_cache, self._prompt_hidden, *_close_gaps(self._residents, done))

    def _has_ended(self, sample: Sample) -> bool:
        return sample.ids[-1] in self._stop_ids or len(sample.ids) == self._sampling.max_tokens


def _move(cache: SlotCache, beside: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copies slots of the cache, and the rows of `beside` that belong to them."""
    if sources:
        source_slots, target_slots = (torch.tensor(slots, device=beside.device) for slots in (sources, targets))
        cache.move(source_slots, target_slots)
        beside[target_slots] = beside[source_slots]


def _close_gaps(items: list[T], gone: Sequence[int]) -> tuple[list[int], list[int]]:
    """Takes `gone`, ascending places, out of `items` by moving what stands last into their places.

    Returns where the moved ones came from and where they went.
    """
    num_left = len(items) - len(gone)
    leaving = set(gone)
    targets = [place for place in gone if place < num_left]
    sources = [place for place in range(num_left, len(items)) if place not in leaving]
    for source, target in zip(sources, targets, strict=True):
        items[target] = items[source]
    del items[num_left:]
    return sources, targets


def _prefill_parts(lengths: Sequence[int]) -> Iterator[slice]:
    """Cuts prompts into runs that take at most PREFILL_TOKENS with padding, or are one prompt."""
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - start) * max(lengths[start : end + 1]) > PREFILL_TOKENS:
            yield slice(start, end)
            start = end
