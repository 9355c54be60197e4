"""A reward model: its scores by hand, alone and in company, and how they join a task's reward."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from expert_iteration.config.schema import RunConfig
from expert_iteration.errors import UserError
from expert_iteration.reward_model import RewardModel, RewardModelVerifier, check_reward_model, with_reward_model
from expert_iteration.types import Prompt, Score

CPU = torch.device("cpu")
TOKENS = ["<pad>", "<eos>", "[CLS]", "[SEP]", "?", *"abcdefgh", "U", "A", *"<>/thinkx"]
VOCABULARY = {token: index for index, token in enumerate(dict.fromkeys(TOKENS))}
PROMPT = Prompt(0, ({"role": "user", "content": "ab"},))
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
CHAT = "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}{% endfor %}<eos>"


def make_tokenizer(*, chat_template: str | None = CHAT, pad_token: str | None = "<pad>") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="?", pad_token=pad_token, cls_token="[CLS]"
    )
    fast.chat_template = chat_template
    return fast


def llama(**sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1, pad_token_id=None, **sizes))
    with torch.no_grad():
        model.score.weight.mul_(20)
    return model.eval()


def reward_model(model: PreTrainedModel | None = None, **arguments: Any) -> RewardModel:
    tokenizer = arguments.pop("tokenizer", None) or make_tokenizer()
    settings: dict[str, Any] = {"batch_size": 3, "max_length": 40, "device": CPU, **arguments}
    return RewardModel(model or llama(), tokenizer, **settings)


def scores_of(model: RewardModel, responses: Sequence[str]) -> list[float]:
    return model.scores([model.encode(PROMPT, response) for response in responses])


def test_a_conversation_is_encoded_by_the_chat_template_without_its_reasoning() -> None:
    expected = [VOCABULARY[token] for token in ("U", "a", "b", "A", "c", "d", "<eos>")]
    assert reward_model().encode(PROMPT, "cd")["input_ids"] == expected
    assert reward_model().encode(PROMPT, "<think>hh</think>cd")["input_ids"] == expected


def test_without_a_template_prompt_and_response_are_a_pair() -> None:
    encoded = reward_model(tokenizer=make_tokenizer(chat_template=None)).encode(PROMPT, "cd")
    assert encoded["input_ids"] == [VOCABULARY[token] for token in "abcd"]


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>", None])
def test_company_changes_no_score(pad_token: str | None) -> None:
    """The score is the head's output at the last real token, whatever the padding token is, even the end token."""
    model = llama()
    scorer = reward_model(model, tokenizer=make_tokenizer(pad_token=pad_token))
    responses = ["c", "defgh", "", "ef", "gggggggg", "h", "ab"]
    together = scores_of(scorer, responses)
    for response, score in zip(responses, together, strict=True):
        ids = torch.tensor([scorer.encode(PROMPT, response)["input_ids"]])
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state  # (1, T, H)
            expected = model.score(hidden[:, -1]).item()
        assert score == pytest.approx(expected, abs=1e-5)
    assert len(set(together)) == len(responses)


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """As BERT's: [CLS] prompt [SEP] response [SEP], the response and what follows it of type 1."""
    tokenizer = make_tokenizer(chat_template=None)
    special = [("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def test_pairs_keep_their_token_types() -> None:
    torch.manual_seed(0)
    bert = BertForSequenceClassification(BertConfig(**SIZES, num_labels=1, initializer_range=1.0)).eval()
    scorer = reward_model(bert, tokenizer=pair_tokenizer())
    encoded = scorer.encode(PROMPT, "c")
    assert encoded["input_ids"] == [VOCABULARY[token] for token in ("[CLS]", "a", "b", "[SEP]", "c", "[SEP]")]
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    together = scores_of(scorer, ["c", "defgh", "ef"])
    for response, score in zip(("c", "defgh", "ef"), together, strict=True):
        inputs = {name: torch.tensor([ids]) for name, ids in scorer.encode(PROMPT, response).items()}
        with torch.no_grad():
            assert score == pytest.approx(bert(**inputs).logits.item(), abs=1e-5)
            untyped = bert(input_ids=inputs["input_ids"]).logits.item()
        assert abs(score - untyped) > 1e-3


def test_a_score_by_hand() -> None:
    """Attention and feed-forward layers add nothing, so the score is the head's weight on the last token's embedding:
    its root mean square is 1 as it is, which the norm keeps."""
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.embed_tokens.weight[VOCABULARY["c"]] = torch.tensor([1.0, -1.0] * 8)
        model.score.weight.zero_()
        model.score.weight[0, :2] = torch.tensor([2.0, 0.5])
    ends_with_the_response = make_tokenizer(chat_template=CHAT.removesuffix("<eos>"))
    scores = scores_of(reward_model(model, tokenizer=ends_with_the_response), ["c", "cd", "dddc"])
    assert scores == pytest.approx([2.0 - 0.5, 2.0 + 0.5, 2.0 - 0.5], abs=1e-4)


def test_a_conversation_without_tokens_has_no_score() -> None:
    scorer = reward_model(tokenizer=make_tokenizer(chat_template=None))
    nothing = Prompt(0, ({"role": "user", "content": ""},))
    verifier = RewardModelVerifier(
        TaskVerifier({"": 1.0, "c": 1.0}), scorer, weight=1.0, task_weight=1.0, transform="none"
    )
    scored, empty = verifier.score_many([(PROMPT, "c"), (nothing, "")])
    assert scored.details["reward_model"] == pytest.approx(scores_of(scorer, ["c"])[0], abs=1e-5)
    assert empty == Score(None, {"success": 1.0, "task_reward": 1.0, "reward_model.invalid": 1.0})


def test_threads_take_turns() -> None:
    """Or the padding id of one call's config, or the CPU that one call moves the model to, would meet another call."""
    model = llama()
    scorer = reward_model(model, offload=True)
    alone = [scores_of(scorer, ["c", "defgh"]), scores_of(scorer, ["[CLS]<pad>", "gh"])]
    entered, second_inside, release = threading.Event(), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if entered.is_set():
            second_inside.set()
        entered.set()
        release.wait(timeout=60)

    hook = model.model.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(scores_of, scorer, ["c", "defgh"])
        assert entered.wait(timeout=60)
        second = pool.submit(scores_of, scorer, ["[CLS]<pad>", "gh"])
        overlapped = second_inside.wait(timeout=0.2)
        release.set()
        results = [first.result(), second.result()]
    hook.remove()
    assert not overlapped
    for result, expected in zip(results, alone, strict=True):
        assert result == pytest.approx(expected, abs=1e-6)


def test_a_template_that_refuses_the_messages_is_a_users_error() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT
    prompt = Prompt(0, ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}))
    for template, message in ((refusing, "no system role"), ("{% for %}", "Expected an expression")):
        scorer = reward_model(tokenizer=make_tokenizer(chat_template=template))
        with pytest.raises(UserError, match=rf"reward_model\.name=.*roles system, user, assistant \({message}"):
            scorer.encode(prompt, "c")


class TaskVerifier:
    """Scores by a table."""

    def __init__(self, rewards: dict[str, float | None]) -> None:
        self.rewards = rewards
        self.is_closed = False

    def score_many(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(self.rewards[text], {"success": float(self.rewards[text] == 1.0)}) for _, text in items]

    def close(self) -> None:
        self.is_closed = True


def test_rewards_are_combined_by_hand() -> None:
    scorer = reward_model()
    c, d = scores_of(scorer, ["c", "d"])
    verifier = RewardModelVerifier(
        TaskVerifier({"c": 1.0, "d": 0.5, "e": None}), scorer, weight=0.25, task_weight=2.0, transform="none"
    )
    first, second, third = verifier.score_many([(PROMPT, text) for text in "cde"])
    assert first.reward == pytest.approx(2.0 * 1.0 + 0.25 * c, abs=1e-6)
    assert second.reward == pytest.approx(2.0 * 0.5 + 0.25 * d, abs=1e-6)
    assert first.details == pytest.approx({"success": 1.0, "task_reward": 1.0, "reward_model": c}, abs=1e-6)
    # The task could not score it.
    assert third == Score(None, {"success": 0.0})
    verifier.close()
    assert verifier._verifier.is_closed  # type: ignore[attr-defined]


def test_the_reward_model_alone_needs_no_task_reward() -> None:
    scorer = reward_model()
    (e,) = scores_of(scorer, ["e"])
    verifier = RewardModelVerifier(TaskVerifier({"e": None}), scorer, weight=1.0, task_weight=0.0, transform="sigmoid")
    (score,) = verifier.score_many([(PROMPT, "e")])
    assert score.reward == pytest.approx(torch.tensor(e).sigmoid().item(), abs=1e-6)
    assert score.details["success"] == 0.0


def test_what_cannot_be_scored_is_unscored_and_says_why() -> None:
    scorer = reward_model(max_length=7)
    verifier = RewardModelVerifier(
        TaskVerifier({"cd": 1.0, "cde": 1.0}), scorer, weight=1.0, task_weight=1.0, transform="none"
    )
    fits, too_long = verifier.score_many([(PROMPT, "cd"), (PROMPT, "cde")])
    assert fits.reward is not None
    assert too_long == Score(None, {"success": 1.0, "task_reward": 1.0, "reward_model.too_long": 1.0})
    broken = llama()
    with torch.no_grad():
        broken.score.weight.fill_(float("nan"))
    verifier = RewardModelVerifier(
        TaskVerifier({"cd": 1.0}), reward_model(broken), weight=1.0, task_weight=1.0, transform="none"
    )
    (score,) = verifier.score_many([(PROMPT, "cd")])
    assert score == Score(None, {"success": 1.0, "task_reward": 1.0, "reward_model.invalid": 1.0})


@pytest.mark.parametrize("value", [-1000.0, -3.0, 0.0, 3.0, 1000.0])
def test_the_sigmoid_overflows_nowhere(value: float) -> None:
    verifier = RewardModelVerifier(TaskVerifier({}), reward_model(), weight=1.0, task_weight=0.0, transform="sigmoid")
    score = verifier._combined(Score(None), value, is_usable=True)
    assert score.reward == pytest.approx(torch.tensor(value, dtype=torch.float64).sigmoid().item(), abs=1e-12)


def config_for(name: str | None, **values: Any) -> RunConfig:
    config = RunConfig()
    config.model.trust_remote_code = False
    settings: dict[str, Any] = {
        "name": name, "weight": 1.0, "task_weight": 1.0, "transform": "none", "batch_size": 2, "max_length": None,
        "torch_dtype": "float32", "device": None, "offload": False, **values,
    }  # fmt: skip
    for key, value in settings.items():
        setattr(config.reward_model, key, value)
    return config


def save(folder: Path, model: PreTrainedModel) -> str:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_saved_model_scores_as_it_did(tmp_path: Path) -> None:
    config = config_for(save(tmp_path, llama()), offload=True)
    check_reward_model(config)
    verifier = with_reward_model(TaskVerifier({"c": 1.0}), config, CPU)
    (score,) = verifier.score_many([(PROMPT, "c")])
    assert score.details["reward_model"] == pytest.approx(scores_of(reward_model(), ["c"])[0], abs=1e-5)
    assert with_reward_model(verifier, config_for(None), CPU) is verifier


def test_models_that_are_no_reward_models_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    two = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=2))
    with pytest.raises(UserError, match=r"reward_model\.name=.*it has 2 outputs, and a reward is one number"):
        check_reward_model(config_for(save(tmp_path / "two", two)))
    language_model = LlamaForCausalLM(LlamaConfig(**SIZES, num_labels=1))
    folder = save(tmp_path / "lm", language_model)
    with pytest.raises(UserError, match=r"reward_model\.name=.*its weights lack score\.weight"):
        with_reward_model(TaskVerifier({}), config_for(folder), CPU)
    with pytest.raises(UserError, match=r"reward_model\.name=./absent: there is no such folder"):
        check_reward_model(config_for("./absent"))


def test_other_peoples_tokenizers_and_lengths_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = save(
        tmp_path / "small", LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "vocab_size": 10}, num_labels=1))
    )
    with pytest.raises(
        UserError, match=rf"its tokenizer has ids up to {len(VOCABULARY) - 1}, .* embeddings for 10 ids"
    ):
        with_reward_model(TaskVerifier({}), config_for(small), CPU)
    folder = save(tmp_path / "llama", llama())
    with pytest.raises(UserError, match=r"reward_model\.max_length=41: .* has positions for 40 tokens"):
        with_reward_model(TaskVerifier({}), config_for(folder, max_length=41), CPU)


@pytest.mark.parametrize("pad_id", [0, 1])
def test_every_position_of_a_model_can_be_used_and_no_more(tmp_path: Path, pad_id: int) -> None:
    """RoBERTa numbers positions from its padding id + 1 on: of 42 it can use 41 or 40."""
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 42}
    roberta = RobertaForSequenceClassification(
        RobertaConfig(**sizes, num_labels=1, pad_token_id=pad_id, bos_token_id=2, eos_token_id=1 - pad_id)
    )
    roberta.save_pretrained(tmp_path)
    make_tokenizer(chat_template=None).save_pretrained(tmp_path)
    usable = 42 - pad_id - 1
    fits, long = "c" * (usable - 2), "c" * (usable - 1)
    verifier = with_reward_model(TaskVerifier({fits: 1.0, long: 1.0}), config_for(str(tmp_path)), CPU)
    scored, too_long = verifier.score_many([(PROMPT, fits), (PROMPT, long)])
    assert scored.reward is not None
    assert too_long.reward is None and too_long.details["reward_model.too_long"] == 1.0


def test_bfloat16_scores_near_float32(tmp_path: Path) -> None:
    folder = save(tmp_path, llama())
    values = []
    for dtype in ("float32", "bfloat16"):
        verifier = with_reward_model(TaskVerifier({"c": 1.0, "defg": 0.0}), config_for(folder, torch_dtype=dtype), CPU)
        values.append(
            [score.details["reward_model"] for score in verifier.score_many([(PROMPT, "c"), (PROMPT, "defg")])]
        )
    assert values[1] == pytest.approx(values[0], rel=0.05)
    assert values[1] != values[0]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("package:absent", "GGUF files hold language models"),
        ("absent.gguf", "GGUF files hold language models"),
        ("org/absent", "there is no such folder"),
    ],
)
def test_names_without_a_reward_model_behind_them(name: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expert_iteration.model_source._hub_unreachable", lambda: True)
    with pytest.raises(UserError, match=match) as caught:
        check_reward_model(config_for(name))
    assert caught.value.problems[0].key == "reward_model.name"
    assert "smollm2" not in str(caught.value)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, llama())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="the folder holds a LoRA adapter; merge it first"):
        check_reward_model(config_for(folder))


def test_a_device_that_is_not_there_is_refused() -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UserError, match=rf"reward_model\.device={absent}: this machine has \d+ CUDA devices"):
        check_reward_model(config_for("org/any", device=absent))


def test_equal_responses_stay_tied() -> None:
    scores = scores_of(reward_model(batch_size=2), ["cd", "e", "cd", "gggggg", "cd"])
    assert scores[0] == scores[2] == scores[4]
    assert len(set(scores)) == 3


def test_a_model_with_a_padding_token_of_its_own_is_asked_as_it_was_trained() -> None:
    """Its end token is its padding token: transformers pools before it, alone and in a batch, and so do we."""
    model = llama()
    model.config.pad_token_id = VOCABULARY["<eos>"]
    scorer = reward_model(model)
    together = scores_of(scorer, ["c", "defgh"])
    for response, score in zip(["c", "defgh"], together, strict=True):
        ids = torch.tensor([scorer.encode(PROMPT, response)["input_ids"]])
        with torch.no_grad():
            assert score == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)
            before_end = model.score(model.model(input_ids=ids).last_hidden_state[:, -2]).item()
        assert score == pytest.approx(before_end, abs=1e-5)
