"""Whether a model computes with the shared attention what it computes with its own."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expert_iteration.engines.continuous import ContinuousBatch, Sample, compute_prefix
from expert_iteration.engines.shared_attention import LAYER_TYPES, shared_attention
from expert_iteration.engines.slots import SlotPlan
from expert_iteration.log_probs import MAX_DIFFERENCE, gather_log_probs
from expert_iteration.types import SamplingParams

MAX_TOKENS = 4
SEEDS = (0, 1)


@torch.no_grad()
def check_shared_attention(model: PreTrainedModel) -> None:
    """Generates from two prompts and compares the log-probs with plain forward passes over the same tokens.

    Families differ in what they give to their attention; one that does not use transformers' attention interface, or
    hands it something unknown here, would sample from another model without a word.

    Raises:
        ValueError: the model's attention is of a kind that is not known here.
    """
    name = type(model).__name__
    unknown = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise ValueError(f"{name} has layers of the types {', '.join(sorted(unknown))}, which are not supported")
    size = min(model.config.get_text_config().vocab_size, 64)
    start = tuple(range(size // 2, size // 2 + 4))
    prompts = {0: (*start, 1), 1: (*start, 2, 3)}
    samples = [Sample(request, seed) for request in prompts for seed in SEEDS]
    sampling = SamplingParams(temperature=1, max_tokens=MAX_TOKENS, stop_token_ids=())
    plan = SlotPlan(len(samples), len(prompts), max(map(len, prompts.values())), MAX_TOKENS - 1)
    try:
        with shared_attention(model):
            prefix = compute_prefix(model, list(prompts.values()))
            ContinuousBatch(model, prompts, samples, sampling=sampling, plan=plan, prefix=prefix).run()
    except Exception as error:  # whatever a family that is not known here runs into
        raise ValueError(f"{name} does not work with the engine's attention: {error}") from error
    differences = torch.cat([_difference(model, prompts[sample.request], sample) for sample in samples])
    # The mean, since in bfloat16 a single unlikely token may be off by more.
    if differences.isfinite().all() and not differences.mean() < MAX_DIFFERENCE:
        raise ValueError(
            f"{name} computes log-probabilities that are off by {differences.mean():.3g} with the engine's attention, "
            "so its own does something that is not known here"
        )


def _difference(model: PreTrainedModel, prompt: tuple[int, ...], sample: Sample) -> Tensor:
    """Per token, the engine's log-prob against that of a plain forward pass: (R,)."""
    ids = torch.tensor([[*prompt, *sample.ids]], device=model.device)  # (1, T)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # (R, V)
    expected = gather_log_probs(logits, ids[0, len(prompt) :])
    return (expected - torch.tensor(sample.log_probs, device=model.device)).abs()
