"""The in-process engine against transformers' own generate and plain forward passes, on tiny random models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from expert_iteration.engines import continuous
from expert_iteration.engines.checksum import deduplicated_state, weights_checksum
from expert_iteration.engines.local import LocalEngine
from expert_iteration.errors import ComponentError, WeightSyncError
from expert_iteration.types import GenerationRequest, SamplingParams, Turn

VOCAB = 64
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_oss")
PROMPTS = ((5, 6, 7), (9,), (11, 3, 8, 20, 33, 2, 17, 40, 41), (9, 10), (60, 1, 2, 3, 4, 5))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(family: str = "llama", seed: int = 0, tied: bool = False) -> PreTrainedModel:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.4,  # far from uniform, so that rounding does not decide
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family in ("llama", "qwen2"):
            made, config = (LlamaForCausalLM, LlamaConfig) if family == "llama" else (Qwen2ForCausalLM, Qwen2Config)
            return made(config(**sizes))
        if family == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
        if family == "gemma2":  # a window shorter than the sequences, soft caps
            return Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, sliding_window=5, attn_implementation="eager"))
        if family == "gemma3":
            layers = ["sliding_attention", "full_attention"]
            return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=8, sliding_window=5, layer_types=layers))
        if family == "gpt_oss":  # sinks, and a window in every other layer
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return GptOssForCausalLM(GptOssConfig(**sizes, **experts, head_dim=8, sliding_window=5))
        if family == "gpt2":
            config = GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=64,
                initializer_range=0.4,
                tie_word_embeddings=tied,
                bos_token_id=None,
                eos_token_id=None,
            )
            return GPT2LMHeadModel(config)
        raise ValueError(family)


def greedy(max_tokens: int = 10, stop: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop)


def warm(
    max_tokens: int = 10, stop: tuple[int, ...] = (), temperature: float = 1.0, top_p: float = 1.0
) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop, top_p=top_p)


def requests_of(prompts: tuple[tuple[int, ...], ...], num_samples: int = 1) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, tuple(range(1000 * index, 1000 * index + num_samples)))
        for index, prompt in enumerate(prompts)
    ]


def reference_greedy(model: PreTrainedModel, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """Response of transformers' generate, one prompt at a time, up to and with the first stop token."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


@torch.no_grad()
def reference_log_probs(model: PreTrainedModel, turn: Turn) -> Tensor:
    """log p of the response ids from one forward pass over the whole sequence, alone and without a cache."""
    logits = model(input_ids=torch.tensor([turn.prompt_ids + turn.response_ids]), use_cache=False).logits[0]
    log_probs = logits.float().log_softmax(-1)[len(turn.prompt_ids) - 1 : -1]  # (response, V)
    return log_probs.gather(-1, torch.tensor(turn.response_ids).unsqueeze(-1)).squeeze(-1)


def late_stop_ids(model: PreTrainedModel) -> tuple[int, int]:
    """The two tokens that make the greedy responses to PROMPTS end at the most different steps."""
    responses = [reference_greedy(model, prompt, greedy()) for prompt in PROMPTS]

    def lengths(stop: tuple[int, int]) -> set[int]:
        return {next((i for i, token in enumerate(response) if token in stop), 99) for response in responses}

    best = max(combinations(range(VOCAB), 2), key=lambda stop: len(lengths(stop)))
    assert len(lengths(best)) >= 3, "the responses have to end at different steps"
    return best


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str) -> None:
    model = tiny_model(family).eval()
    sampling = greedy(stop=late_stop_ids(model))
    expected = [reference_greedy(model, prompt, sampling) for prompt in PROMPTS]

    turns = [group[0] for group in LocalEngine(model, max_sequences=8).generate(requests_of(PROMPTS), sampling)]
    assert [turn.response_ids for turn in turns] == expected
    assert [turn.prompt_ids for turn in turns] == list(PROMPTS)
    for turn in turns:
        assert turn.finish_reason == ("stop" if turn.response_ids[-1] in sampling.stop_token_ids else "length")


@pytest.mark.parametrize("family", FAMILIES)
def test_EI_16_log_probs_are_the_models_own_whatever_the_sampling(family: str) -> None:
    model = tiny_model(family).eval()
    engine = LocalEngine(model, max_sequences=16)
    for group in engine.generate(requests_of(PROMPTS, 3), warm(temperature=1.7, top_p=0.9, stop=(1, 2, 3))):
        for turn in group:
            assert len(turn.log_probs) == len(turn.response_ids)
            torch.testing.assert_close(
                torch.tensor(turn.log_probs), reference_log_probs(model, turn), atol=1e-4, rtol=0
            )


def test_EI_17_log_probs_belong_to_the_sampled_ids_and_not_to_the_likeliest() -> None:
    model = tiny_model().eval()
    turns = [
        t for group in LocalEngine(model, max_sequences=64).generate(requests_of(PROMPTS, 8), warm()) for t in group
    ]
    others = [reference_greedy(model, turn.prompt_ids, greedy(1))[0] != turn.response_ids[0] for turn in turns]
    assert sum(others) >= 5, "many first tokens have to differ from the likeliest"
    for turn in turns:
        torch.testing.assert_close(torch.tensor(turn.log_probs), reference_log_probs(model, turn), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("sampling", [greedy(6, stop=(1, 2, 3)), warm(6, stop=(1, 2, 3, 4, 5, 6))])
def test_samples_are_those_of_separate_calls_with_the_same_seeds(family: str, sampling: SamplingParams) -> None:
    engine = LocalEngine(tiny_model(family), max_sequences=64)
    requests = requests_of(PROMPTS, 3)
    together = engine.generate(requests, sampling)
    for request, group in zip(requests, together, strict=True):
        for seed, turn in zip(request.seeds, group, strict=True):
            [[alone]] = engine.generate([GenerationRequest(request.prompt_ids, (seed,))], sampling)
            assert alone.response_ids == turn.response_ids
            assert alone.finish_reason == turn.finish_reason
    if sampling.temperature > 0:
        assert any(len({turn.response_ids for turn in group}) > 1 for group in together), "the seeds have to matter"


@pytest.mark.parametrize("max_sequences", [1, 3, 7])
def test_fewer_in_flight_give_what_all_together_give(max_sequences: int) -> None:
    model = tiny_model()
    requests = requests_of(PROMPTS, 4)
    sampling = warm(stop=(1, 2, 3, 4, 5, 6))
    together = LocalEngine(model, max_sequences=20).generate(requests, sampling)
    fewer = LocalEngine(model, max_sequences=max_sequences).generate(requests, sampling)
    assert [[t.response_ids for t in group] for group in fewer] == [[t.response_ids for t in g] for g in together]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_cached_tokens", [None, 60])
def test_joining_samples_are_what_generate_gives(family: str, max_cached_tokens: int | None) -> None:
    # Ends at different steps and three in flight of ten: slots are given up and taken over, prompts come and go.
    model = tiny_model(family).eval()
    sampling = greedy(stop=late_stop_ids(model))
    expected = [reference_greedy(model, prompt, sampling) for prompt in PROMPTS]
    engine = LocalEngine(model, max_sequences=3, max_cached_tokens=max_cached_tokens)
    for turns, response in zip(engine.generate(requests_of(PROMPTS, 2), sampling), expected, strict=True):
        assert [turn.response_ids for turn in turns] == [response, response]


def test_a_window_that_ends_inside_the_prompt_hides_its_beginning() -> None:
    # Prompts of 9 and 12 tokens that share 3, a window of 5: the shared beginning is out of sight for every response.
    model = tiny_model("gemma3").eval()
    prompts = ((7, 8, 9, 11, 3, 8, 20, 33, 2), (7, 8, 9, 17, 40, 41, 22, 6, 5, 4, 3, 2))
    expected = [reference_greedy(model, prompt, greedy()) for prompt in prompts]
    turns = LocalEngine(model, max_sequences=8).generate(requests_of(prompts, 2), greedy())
    assert [[turn.response_ids for turn in group] for group in turns] == [[response] * 2 for response in expected]


def forwards(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Shapes of the ids of every forward pass of the decoder from now on."""
    shapes: list[tuple[int, ...]] = []
    model.get_decoder().register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_a_prompt_is_prefilled_once_and_no_batch_is_too_large() -> None:
    model = tiny_model()
    engine = LocalEngine(model, max_sequences=6)
    shapes = forwards(model)
    engine.generate([GenerationRequest((1, 2, 3), tuple(range(8))), GenerationRequest((4, 5, 6, 7), (1, 2))], warm(3))
    # Six samples of the first prompt, then its other two with the second prompt, which is prefilled only then.
    assert shapes == [(1, 3), (6, 1), (6, 1), (1, 4), (4, 1), (4, 1)]


def test_what_all_prompts_begin_with_is_computed_once() -> None:
    model = tiny_model()
    engine = LocalEngine(model, max_sequences=6)
    shapes = forwards(model)
    prompts = ((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5, 6))
    turns = engine.generate(requests_of(prompts), warm(2))
    # The second prompt keeps one token of its own; prompts go by length, 1, 2 and 3 tokens behind the first two.
    assert shapes == [(1, 2), (3, 3), (3, 1)]
    for group in turns:
        for turn in group:
            torch.testing.assert_close(torch.tensor(turn.log_probs), reference_log_probs(model, turn))


def test_long_prefills_are_cut_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    engine = LocalEngine(model, max_sequences=64)
    expected = engine.generate(requests_of(PROMPTS, 2), warm())
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 10)
    shapes = forwards(model)
    cut = engine.generate(requests_of(PROMPTS, 2), warm())
    # Sorted lengths 1, 2, 3, 6, 9: at most 10 tokens with padding, or a single prompt.
    assert [shape for shape in shapes if shape[0] != 10] == [(3, 3), (1, 6), (1, 9)]
    assert [[t.response_ids for t in group] for group in cut] == [[t.response_ids for t in group] for group in expected]


def test_logits_are_made_in_parts_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(tiny_model(), max_sequences=64)
    expected = engine.generate(requests_of(PROMPTS, 2), warm())
    monkeypatch.setattr(continuous, "MAX_LOGITS", 3 * VOCAB)  # three samples of the ten at a time
    parts = engine.generate(requests_of(PROMPTS, 2), warm())
    assert [[t.response_ids for t in group] for group in parts] == [[t.response_ids for t in g] for g in expected]


def test_ended_sequences_leave_the_batch() -> None:
    model = tiny_model().eval()
    sampling = greedy(stop=late_stop_ids(model))
    engine = LocalEngine(model, max_sequences=8)
    shapes = forwards(model)
    turns = [group[0] for group in engine.generate(requests_of(PROMPTS), sampling)]
    steps = shapes[1:]
    assert len(steps) == max(len(turn.response_ids) for turn in turns) - 1
    for step, (num_sequences, _) in enumerate(steps, start=1):
        assert num_sequences == sum(len(turn.response_ids) > step for turn in turns)


def test_waiting_samples_join_as_soon_as_others_end() -> None:
    model = tiny_model().eval()
    sampling = greedy(stop=late_stop_ids(model))
    lengths = [len(reference_greedy(model, prompt, sampling)) for prompt in sorted(PROMPTS, key=len)]
    engine = LocalEngine(model, max_sequences=2)
    shapes = forwards(model)
    engine.generate(requests_of(PROMPTS), sampling)
    # Two slots; each takes the next prompt as soon as its sample has ended. Waves of two would take the sum of maxima.
    free_at = [0, 0]
    for length in lengths:
        free_at.sort()
        free_at[0] += length
    waves = [max(lengths[start : start + 2]) for start in (0, 2, 4)]
    assert max(free_at) < sum(waves)
    # The very first tokens come from the prefill of the first two prompts, which have 1 and 2 tokens.
    assert shapes[0] == (2, 2)
    assert len([shape for shape in shapes[1:] if shape[1] == 1]) == max(free_at) - 1


def test_the_same_call_twice_gives_the_same_bits() -> None:
    engine = LocalEngine(tiny_model(), max_sequences=8)
    sampling = warm(stop=(1, 2, 3))
    assert engine.generate(requests_of(PROMPTS, 3), sampling) == engine.generate(requests_of(PROMPTS, 3), sampling)


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    engine = LocalEngine(tiny_model(), max_sequences=8)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = engine.generate(requests_of(PROMPTS, 2), warm())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert engine.generate(requests_of(PROMPTS, 2), warm()) == first


def test_EI_12_the_end_token_is_kept_and_the_pad_token_in_a_prompt_is_seen() -> None:
    model = tiny_model().eval()
    end = 0  # also the pad token of the config
    prompts = ((end, 5, end, 6), (7,))
    expected = [reference_greedy(model, prompt, greedy()) for prompt in prompts]
    turns = [group[0] for group in LocalEngine(model, max_sequences=8).generate(requests_of(prompts), greedy())]
    assert [turn.response_ids for turn in turns] == expected
    # With every token a stop token the response is that one token, with its log-prob, and nothing is padded.
    [[turn]] = LocalEngine(model, max_sequences=8).generate(
        [GenerationRequest((7,), (1,))], greedy(5, tuple(range(VOCAB)))
    )
    assert turn.response_ids == expected[1][:1]
    assert len(turn.log_probs) == 1
    assert turn.finish_reason == "stop"


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    model = tiny_model().eval()
    response = reference_greedy(model, (5, 6, 7), greedy(3))
    assert response[2] not in response[:2]
    [[turn]] = LocalEngine(model, max_sequences=1).generate(
        [GenerationRequest((5, 6, 7), (1,))], greedy(3, response[2:])
    )
    assert turn.response_ids == response
    assert turn.finish_reason == "stop"


def test_first_tokens_follow_the_models_distribution() -> None:
    model = tiny_model().eval()
    num_samples = 4000
    [turns] = LocalEngine(model, max_sequences=num_samples).generate(
        [GenerationRequest((5, 6, 7), tuple(range(num_samples)))], warm(1)
    )
    counts = torch.tensor([turn.response_ids[0] for turn in turns]).bincount(minlength=VOCAB)
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    deviations = (counts / num_samples - probs) / (probs * (1 - probs) / num_samples).sqrt()
    # 64 shares; of those with enough counts for a normal distribution none is 4.5 standard errors off.
    assert deviations[probs > 0.005].abs().max() < 4.5


def test_nothing_asked_nothing_given() -> None:
    engine = LocalEngine(tiny_model(), max_sequences=8)
    assert engine.generate([], warm()) == []
    assert engine.generate([GenerationRequest((1, 2), ())], warm()) == [[]]


def test_lengths_that_do_not_fit_are_refused() -> None:
    engine = LocalEngine(tiny_model(), max_sequences=8, max_model_len=12)
    assert engine.max_model_len == 12
    [[turn]] = engine.generate([GenerationRequest((1, 2), (0,))], greedy(10))
    assert len(turn.response_ids) == 10
    with pytest.raises(ValueError, match="request 1: 3 prompt tokens and 10 more exceed 12"):
        engine.generate([GenerationRequest((1, 2), (0,)), GenerationRequest((1, 2, 3), (0,))], greedy(10))
    with pytest.raises(ValueError, match="request 0: the prompt is empty"):
        engine.generate([GenerationRequest((), (0,))], greedy(10))


def test_max_model_len_comes_from_the_config_and_cannot_exceed_it() -> None:
    assert LocalEngine(tiny_model("gpt2"), max_sequences=1).max_model_len == 64
    with pytest.raises(ValueError, match="max_model_len=65"):
        LocalEngine(tiny_model("gpt2"), max_sequences=1, max_model_len=65)
    with pytest.raises(ValueError, match="max_sequences=0"):
        LocalEngine(tiny_model(), max_sequences=0)


def test_an_attention_that_cannot_be_shared_is_refused() -> None:
    # Its attention does not go through transformers' interface, and adds a bias for distance.
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4))
    with pytest.raises(ValueError, match="BloomForCausalLM computes log-probabilities that are off by"):
        LocalEngine(model, max_model_len=64)
    llama = tiny_model()
    llama.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="LlamaForCausalLM has layers of the types linear_attention"):
        LocalEngine(llama)


def test_the_models_own_attention_is_in_place_outside_of_the_engine() -> None:
    model = tiny_model()
    engine = LocalEngine(model)
    engine.generate(requests_of(PROMPTS), greedy(2))
    assert model.config._attn_implementation == "sdpa"


def test_the_model_is_in_eval_mode_and_carries_no_graph() -> None:
    model = tiny_model("gpt2").train()  # with dropout
    engine = LocalEngine(model, max_sequences=8)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert engine.generate(requests_of(PROMPTS), greedy()) == engine.generate(requests_of(PROMPTS), greedy())


def test_weights_of_several_types_are_refused() -> None:
    model = tiny_model()
    model.lm_head.bfloat16()
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*torch\.float32"):
        LocalEngine(model, max_sequences=8)


def test_broken_weights_are_reported_and_not_sampled_from() -> None:
    model = tiny_model()
    engine = LocalEngine(model, max_sequences=8)
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(ComponentError, match="log-probabilities"):
        engine.generate(requests_of(PROMPTS), warm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", ["all", "deduplicated"])
def test_EI_18_after_load_weights_it_is_the_other_model(tied: bool, names: str) -> None:
    engine = LocalEngine(tiny_model(seed=0, tied=tied), max_sequences=8)
    other = tiny_model(seed=1, tied=tied)
    before = engine.generate(requests_of(PROMPTS), greedy())
    assert engine.policy_version == 0
    state = other.state_dict() if names == "all" else deduplicated_state(other)
    engine.load_weights(iter(state.items()), version=7)
    assert engine.policy_version == 7
    assert engine.checksum() == weights_checksum(deduplicated_state(other).items())
    after = engine.generate(requests_of(PROMPTS), greedy())
    assert after == LocalEngine(other, max_sequences=8).generate(requests_of(PROMPTS), greedy())
    assert after != before


def test_loaded_weights_are_copies() -> None:
    engine = LocalEngine(tiny_model(seed=0), max_sequences=8)
    other = tiny_model(seed=1)
    engine.load_weights(other.state_dict().items(), version=1)
    held = engine.checksum()
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    assert engine.checksum() == held


def test_weights_are_cast_to_the_engines_type() -> None:
    engine = LocalEngine(tiny_model(seed=0).bfloat16(), max_sequences=8)
    other = tiny_model(seed=1)
    engine.load_weights(other.state_dict().items(), version=1)
    assert engine.checksum() == weights_checksum(deduplicated_state(other).items(), torch.bfloat16)
    [[turn]] = engine.generate([GenerationRequest((5, 6), (1,))], warm())
    assert len(turn.response_ids) == 10


def test_a_load_returns_the_share_of_weights_that_the_cast_lets_change() -> None:
    engine = LocalEngine(tiny_model().bfloat16(), max_sequences=8)
    assert engine.dtype == torch.bfloat16
    weights = {name: tensor.float().clone() for name, tensor in deduplicated_state(engine._model).items()}
    count = sum(tensor.numel() for tensor in weights.values())
    assert engine.load_weights(weights.items(), version=1) == 0
    weights["model.norm.weight"][:4] = 1.0001  # it starts at 1, where bfloat16 has steps of 1/128
    assert engine.load_weights(weights.items(), version=2) == 0
    weights["model.norm.weight"][:4] = 1.1
    assert engine.load_weights(weights.items(), version=3) == 4 / count
    assert engine.load_weights(weights.items(), version=4) == 0


def test_persistent_buffers_are_loaded_too() -> None:
    model, other = tiny_model(), tiny_model()
    model.register_buffer("scale", torch.zeros(2))
    other.register_buffer("scale", torch.ones(2))
    engine = LocalEngine(model, max_sequences=8)
    engine.load_weights(other.state_dict().items(), version=1)
    assert model.scale.tolist() == [1, 1]


def test_weights_that_do_not_fit_change_nothing_and_are_all_named() -> None:
    engine = LocalEngine(tiny_model(seed=0), max_sequences=8)
    held = engine.checksum()
    state = dict(tiny_model(seed=1).state_dict())
    norm = state.pop("model.norm.weight")
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 3)
    state["surplus"] = torch.zeros(1)
    twice = ("lm_head.weight", state["lm_head.weight"])
    with pytest.raises(WeightSyncError) as error:
        engine.load_weights([*state.items(), twice], version=3)
    message = str(error.value)
    assert "version 3" in message
    assert "missing: model.norm.weight;" in message
    assert "unknown: surplus;" in message
    assert "given twice: lm_head.weight;" in message
    assert "misshapen: model.layers.0.mlp.up_proj.weight (2, 3) instead of (48, 32)" in message
    assert engine.policy_version == 0
    assert engine.checksum() == held

    state = dict(tiny_model(seed=1).state_dict())
    assert state["model.norm.weight"].shape == norm.shape
    engine.load_weights(state.items(), version=3)
    assert engine.checksum() != held


def test_one_corrupted_element_shows_in_the_checksum() -> None:
    model = tiny_model()
    engine = LocalEngine(model, max_sequences=8)
    held = engine.checksum()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 4] += 1e-3
    assert engine.checksum() != held


def test_weights_do_not_change_in_the_middle_of_a_generation() -> None:
    model = tiny_model(seed=0)
    engine = LocalEngine(model, max_sequences=8)
    expected = engine.generate(requests_of(PROMPTS), greedy())
    other = tiny_model(seed=1).state_dict()
    pushes: list[threading.Thread] = []

    def push_at_the_first_forward(*_: object) -> None:
        if not pushes:
            pushes.append(threading.Thread(target=engine.load_weights, args=(other.items(), 1)))
            pushes[0].start()
            pushes[0].join(timeout=0.2)

    model.get_decoder().register_forward_pre_hook(push_at_the_first_forward)
    assert engine.generate(requests_of(PROMPTS), greedy()) == expected
    pushes[0].join()
    assert engine.policy_version == 1
    assert engine.generate(requests_of(PROMPTS), greedy()) != expected
