"""A reward model: its scores by hand, alone and in company, and how they join a task's reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
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


def test_pairs_keep_their_token_types() -> None:
    torch.manual_seed(0)
    bert = BertForSequenceClassification(BertConfig(**SIZES, num_labels=1)).eval()
    scorer = reward_model(bert, tokenizer=make_tokenizer(chat_template=None))
    one_by_one = [scores_of(scorer, [response])[0] for response in ("c", "defgh", "ef")]
    assert scores_of(scorer, ["c", "defgh", "ef"]) == pytest.approx(one_by_one, abs=1e-5)


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
