"""One side of benchmarks/generation.py, in a process of its own and, for vLLM, in an environment of its own.

Reads a setting as JSON from the first line of stdin, then one line per turn with the turn's seed and the number of
tokens; answers each with a line of JSON: seconds, tokens generated, peak memory. Nothing of this project is imported
for a peer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

Generate = Callable[[int, int], int]
"""(seed, max tokens) -> tokens generated."""


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setting = json.loads(sys.stdin.readline())
    generate = {"engine": engine, "generate": transformers_generate, "vllm": vllm}[setting["side"]](setting)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        start = perf_counter()
        tokens = generate(turn["seed"], turn["max_tokens"])
        seconds = perf_counter() - start
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_bytes": peak}), file=answers, flush=True)


def engine(setting: dict[str, Any]) -> Generate:
    """The in-process engine, as a run sets it up."""
    import torch
    from transformers import AutoModelForCausalLM

    from expert_iteration.engines.local import LocalEngine
    from expert_iteration.runtime.allocator import keep_freed_memory
    from expert_iteration.seeding import derive_seed
    from expert_iteration.types import GenerationRequest, SamplingParams

    keep_freed_memory()
    torch.set_num_threads(setting["threads"])
    model = AutoModelForCausalLM.from_pretrained(setting["model"], dtype=getattr(torch, setting["dtype"]))
    made = LocalEngine(model, max_sequences=setting["batch"])

    def generate(seed: int, max_tokens: int) -> int:
        requests = [
            GenerationRequest(tuple(ids), tuple(derive_seed(seed, row, place) for place in range(setting["samples"])))
            for row, ids in enumerate(setting["prompts"])
        ]
        turns = made.generate(requests, SamplingParams(setting["temperature"], max_tokens, tuple(setting["stop_ids"])))
        return sum(len(turn.log_probs) for group in turns for turn in group)

    return generate


def transformers_generate(setting: dict[str, Any]) -> Generate:
    """transformers' `generate`, with the log-probs of the sampled tokens from the logits that it keeps."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setting["threads"])
    model = AutoModelForCausalLM.from_pretrained(setting["model"], dtype=getattr(torch, setting["dtype"])).eval()
    width = max(map(len, setting["prompts"]))
    rows = [[0] * (width - len(ids)) + ids for ids in setting["prompts"] for _ in range(setting["samples"])]
    lengths = torch.tensor([len(ids) for ids in setting["prompts"] for _ in range(setting["samples"])])
    all_ids = torch.tensor(rows)  # (sequences, width), padded on the left
    all_masks = torch.arange(width) >= width - lengths.unsqueeze(-1)
    ends = setting["stop_ids"]

    @torch.no_grad()
    def part(ids: torch.Tensor, mask: torch.Tensor, max_tokens: int) -> int:
        output = model.generate(
            ids,
            attention_mask=mask.long(),
            do_sample=True,
            temperature=setting["temperature"],
            top_k=0,
            max_new_tokens=max_tokens,
            min_new_tokens=None if ends else max_tokens,
            eos_token_id=ends or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, width:]  # (B, R)
        for step, logits in enumerate(output.logits):
            (logits.float().gather(-1, tokens[:, step, None]).squeeze(-1) - logits.float().logsumexp(-1)).tolist()
        if not ends:
            return tokens.numel()
        is_end = torch.isin(tokens, torch.tensor(ends))
        return int((is_end.cumsum(-1) - is_end.long() == 0).sum())

    def generate(seed: int, max_tokens: int) -> int:
        torch.manual_seed(seed)
        parts = zip(all_ids.split(setting["batch"]), all_masks.split(setting["batch"]), strict=True)
        return sum(part(ids, mask, max_tokens) for ids, mask in parts)

    return generate


def vllm(setting: dict[str, Any]) -> Generate:
    """vLLM in this process, prompts shared through its prefix cache, eager or compiled."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(setting["kv_cache_gib"]),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting['threads'] - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=setting["model"],
        dtype=setting["dtype"],
        enforce_eager=setting["eager"],
        max_num_seqs=setting["batch"],
        max_model_len=setting["max_model_len"],
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def generate(seed: int, max_tokens: int) -> int:
        # Else the next turn would find the prompts of this one in the cache, which new weights empty.
        llm.reset_prefix_cache()
        ends = setting["stop_ids"]
        sampling = SamplingParams(
            n=setting["samples"],
            temperature=setting["temperature"],
            seed=None,
            max_tokens=max_tokens,
            min_tokens=0 if ends else max_tokens,
            ignore_eos=not ends,
            stop_token_ids=ends,
            logprobs=0,
            detokenize=False,
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in setting["prompts"]], sampling, use_tqdm=False)
        return sum(len(completion.logprobs) for output in outputs for completion in output.outputs)

    return generate


if __name__ == "__main__":
    main()
