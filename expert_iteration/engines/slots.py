"""How many samples and prompts have their keys and values held at a time.

The cache has two parts: a slot for each prompt, as wide as the longest, and one for each sample's own tokens. A prompt
takes its slot once, whatever the number of its samples.

The numbers follow from the requests and the bounds alone, never from free memory or time, so the same call always
decodes the same samples together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots that are allocated together."""

    samples: int
    prompts: int
    prompt_columns: int
    """Tokens of a prompt's slot."""
    own_columns: int
    """Tokens of a sample's slot."""

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values the slots hold."""
        return self.samples * self.own_columns + self.prompts * self.prompt_columns


def plan_slots(
    longest_prompt: int,
    num_prompts: int,
    num_samples: int,
    max_tokens: int,
    *,
    max_sequences: int | None,
    max_cached_tokens: int | None,
) -> SlotPlan:
    """As many slots as the bounds allow, and no more than there are samples; at least one sample and its prompt.

    Args:
        longest_prompt: tokens.
        num_prompts: of the call.
        num_samples: of the call, over all its prompts.
        max_tokens: of a response; the last one is never fed back, so its keys and values are never held.
        max_sequences: most samples in flight; None is no bound.
        max_cached_tokens: most tokens whose keys and values are held; None is no bound.
    """
    own_columns = max(max_tokens - 1, 1)

    def plan(samples: int) -> SlotPlan:
        # Twice what the samples in flight need when all their prompts are full, since a prompt keeps its slot until the
        # last of its samples has ended.
        prompts = 2 * ceil(samples * num_prompts / num_samples) + 1
        return SlotPlan(samples, min(prompts, samples, num_prompts), longest_prompt, own_columns)

    most = num_samples if max_sequences is None else min(max_sequences, num_samples)
    if max_cached_tokens is None:
        return plan(most)
    fitting = bisect_right(range(1, most + 1), max_cached_tokens, key=lambda samples: plan(samples).cached_tokens)
    return plan(max(fitting, 1))


def cut_runs(
    lengths: Sequence[int],
    num_samples: Sequence[int],
    max_tokens: int,
    *,
    max_sequences: int | None,
    max_cached_tokens: int | None,
) -> Iterator[slice]:
    """Cuts prompts, sorted by length, into runs that are generated one after the other.

    One run where the bounds let as many samples in flight as without `max_cached_tokens`. Else prompts that are more
    than twice as long as others are kept apart from them: a single long prompt would make every slot as wide as itself.

    Args:
        lengths: tokens of each prompt, ascending.
        num_samples: of each prompt.
        max_tokens: of a response.
        max_sequences: as in `plan_slots`.
        max_cached_tokens: as in `plan_slots`.
    """
    total = sum(num_samples)
    bounds = {"max_sequences": max_sequences, "max_cached_tokens": max_cached_tokens}
    together = plan_slots(lengths[-1], len(lengths), total, max_tokens, **bounds)
    if together.samples == min(total, max_sequences or total):
        yield slice(0, len(lengths))
        return
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end] > 2 * lengths[start]:
            yield slice(start, end)
            start = end
