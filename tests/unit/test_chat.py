from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from expert_iteration.chat import ChatEncoder
from expert_iteration.errors import UserError
from expert_iteration.types import Prompt, Turn

BOS, EOS, USER, ASSISTANT, END = 1, 2, 3, 4, 5
SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "<end>"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *LETTERS, "Ġ", "Ċ", *"0123456789", "ab"])}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def ids(text: str) -> tuple[int, ...]:
    """One id per character."""
    return tuple(VOCABULARY[character.replace(" ", "Ġ").replace("\n", "Ċ")] for character in text)


def make_tokenizer(chat_template: str | None = TEMPLATE, specials_added: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Byte-level BPE with the one merge a + b; adds `specials_added` to plain text."""
    tokenizer = Tokenizer(models.BPE(VOCABULARY, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(single=specials_added, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<assistant>", "<end>"],
    )
    fast.chat_template = chat_template
    return fast


def make_prompt(*contents: str) -> Prompt:
    return Prompt(row_id=0, messages=tuple({"role": "user", "content": content} for content in contents))


def make_turn(*response_ids: int) -> Turn:
    return Turn((1,), response_ids, tuple(-1.0 for _ in response_ids), "stop")


def test_EI_45_exactly_one_bos_when_template_and_tokenizer_both_write_it() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer("c")["input_ids"] == [BOS, *ids("c")]
    encoded = ChatEncoder(tokenizer, None).encode(make_prompt("c d"))
    assert encoded == (BOS, USER, *ids("c d"), EOS, ASSISTANT)


def test_a_template_that_writes_no_bos_gets_none() -> None:
    template = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    assert ChatEncoder(make_tokenizer(), template).encode(make_prompt("c")) == (USER, *ids("c"))


def test_EI_12_end_of_turn_tokens_of_the_prompt_stay() -> None:
    encoded = ChatEncoder(make_tokenizer(), None).encode(make_prompt("c", "d", "e"))
    assert encoded.count(EOS) == 3


@pytest.mark.parametrize(
    ("specials_added", "bos"), [("<s> $A", (BOS,)), ("$A", ()), ("<s> $A </s>", (BOS,)), ("$A </s>", ())]
)
def test_plain_joins_contents_by_newlines_and_takes_over_bos_alone(specials_added: str, bos: tuple[int, ...]) -> None:
    encoder = ChatEncoder(make_tokenizer(specials_added=specials_added), "plain")
    assert encoder.encode(make_prompt("c", "d")) == (*bos, *ids("c\nd"))


def test_the_tokenizer_carries_the_template_in_use() -> None:
    override = "{{ messages[0]['content'] }}"
    for setting, carried in ((None, TEMPLATE), (override, override), ("plain", None)):
        tokenizer = make_tokenizer()
        ChatEncoder(tokenizer, setting)
        assert tokenizer.chat_template == carried


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("<user>{{ messages[0]['content'] }}<end>")
    assert ChatEncoder(make_tokenizer(), str(file)).encode(make_prompt("c")) == (USER, *ids("c"), END)


@pytest.mark.parametrize(
    ("own", "setting", "constraint"),
    [
        (None, None, "no chat template of its own"),
        (None, "", "no chat template of its own"),
        (TEMPLATE, "{% for m in messages %}{{ m['content'] }}", "cannot be rendered"),
        (TEMPLATE, "{{ raise_exception('not for me') }}", "not for me"),
        (TEMPLATE, "{% for m in messages %}{{ m['value'] }}{% endfor %}", "does not show the content"),
        (TEMPLATE, "missing.jinja", "neither a Jinja template nor the path of a file"),
    ],
)
def test_unusable_templates_are_refused_with_the_way_out(own: str | None, setting: str | None, constraint: str) -> None:
    with pytest.raises(UserError) as caught:
        ChatEncoder(make_tokenizer(own), setting)
    (problem,) = caught.value.problems
    assert problem.key == "model.chat_template"
    assert constraint in problem.constraint
    assert "model.chat_template=plain" in problem.way_out


def test_messages_that_the_template_refuses_are_the_users_error() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    encoder = ChatEncoder(make_tokenizer(), template)
    with pytest.raises(UserError, match="no system role"):
        encoder.encode(Prompt(0, ({"role": "system", "content": "c"}, {"role": "user", "content": "d"})))


def test_EI_11_decoding_follows_the_sampled_ids_and_never_merges_them() -> None:
    encoder = ChatEncoder(make_tokenizer(), None)
    split = make_turn(*ids("a"), *ids("b"))
    assert encoder.decode(split, include_stop=False) == "ab"
    # Encoding that text again gives another sequence, which is why nobody does.
    assert encoder.tokenizer("ab", add_special_tokens=False)["input_ids"] == [VOCABULARY["ab"]]


def test_the_end_token_is_shown_only_when_asked_for_and_sampled() -> None:
    encoder = ChatEncoder(make_tokenizer(), None, end_token_ids=[END])
    for stop, text in ((EOS, "</s>"), (END, "<end>")):
        turn = make_turn(*ids("4"), stop)
        assert encoder.decode(turn, include_stop=False) == "4"
        assert encoder.decode(turn, include_stop=True) == "4" + text
    assert encoder.decode(make_turn(*ids("4")), include_stop=True) == "4"
    assert encoder.decode(make_turn(EOS), include_stop=False) == ""


def test_an_end_token_that_is_no_special_token_is_left_out_as_well() -> None:
    encoder = ChatEncoder(make_tokenizer(), None, end_token_ids=ids("z"))
    assert encoder.decode(make_turn(*ids("4z")), include_stop=False) == "4"
    assert encoder.decode(make_turn(*ids("4z")), include_stop=True) == "4z"


def test_stop_ids_are_those_of_tokenizer_and_model_once_each() -> None:
    assert ChatEncoder(make_tokenizer(), None).stop_token_ids == (EOS,)
    assert ChatEncoder(make_tokenizer(), None, end_token_ids=[END, EOS, END]).stop_token_ids == (EOS, END)


def test_a_written_response_ends_as_the_template_ends_it() -> None:
    encoder = ChatEncoder(make_tokenizer(), None)
    assert encoder.encode_response("c d") == (*ids("c d"), EOS)
    # The template closes with a token of its own, which the model's generation config lists as well.
    own_end = ChatEncoder(make_tokenizer(TEMPLATE.replace("</s>", "<end>")), None, end_token_ids=[END])
    assert own_end.encode_response("c") == (*ids("c"), END)
    assert ChatEncoder(make_tokenizer(None), "plain").encode_response("c") == (*ids("c"), EOS)


def test_a_written_response_has_the_ids_that_the_whole_chat_has() -> None:
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer, None)
    chat = [{"role": "user", "content": "c d"}, {"role": "assistant", "content": "d e"}]
    whole = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
    assert [*encoder.encode(make_prompt("c d")), *encoder.encode_response("d e")] == whole
