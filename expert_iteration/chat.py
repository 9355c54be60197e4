"""Chat messages to token ids, and sampled ids back to text.

Ids are what flows: a prompt is rendered to ids once, the engine gets those ids, and training sees them again. Text is
made from sampled ids for the reward alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerBase

from expert_iteration.errors import Problem, UserError
from expert_iteration.types import Prompt, Turn

PLAIN = "plain"
_PROBE = "probe 1234567"


class ChatEncoder:
    """Encodes prompts and decodes responses.

    Args:
        tokenizer: belongs to the encoder from then on. Its chat template becomes the one in use (none with `plain`), so
            that a model saved with it carries the template that it was trained with.
        chat_template: a Jinja template, a path of a file that holds one, `plain`, or None for the tokenizer's own.
            `plain` joins the messages' contents by newlines and puts BOS first if the tokenizer does so to plain text.
        end_token_ids: ids that end a response besides the tokenizer's end token, as the model's generation config
            lists them.

    Raises:
        UserError: there is no such template, it is not valid Jinja, or it leaves out what the user says.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, end_token_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.is_plain = chat_template == PLAIN
        self._setting = chat_template or "(blank)"
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *end_token_ids]))
        if self.is_plain:
            tokenizer.chat_template = None
        elif chat_template:
            tokenizer.chat_template = _read_template(chat_template)
        elif tokenizer.chat_template is None:
            raise self._error("the tokenizer has no chat template of its own")
        self._check_template()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of the prompt up to where the response begins.

        Raises:
            UserError: the template refuses these messages.
        """
        if self.is_plain:
            return self._encode_plain("\n".join(message["content"] for message in prompt.messages))
        # The template writes every special token, so that the tokenizer adds none of its own.
        return tuple(self.tokenizer(self._render(prompt.messages), add_special_tokens=False)["input_ids"])

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Ids of a response that was written and not sampled, with the end token that the template puts after it."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return (*ids, *self._end_ids)

    def decode(self, turn: Turn, include_stop: bool) -> str:
        """Text of the response without special tokens; `include_stop` keeps the end token's text if it was sampled."""
        ids = list(turn.response_ids)
        ended = bool(ids) and ids[-1] in self.stop_token_ids
        text = self._text(ids[:-1] if ended else ids, skip_special_tokens=True)
        if ended and include_stop:
            text += self._text(ids[-1:], skip_special_tokens=False)
        return text

    @cached_property
    def _end_ids(self) -> tuple[int, ...]:
        """The end token of the template, else the tokenizer's; empty where there is none."""
        if not self.is_plain:
            messages = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
            rest = self._render(messages, add_generation_prompt=False).rpartition(_PROBE)[2]
            for token in self.tokenizer(rest, add_special_tokens=False)["input_ids"]:
                if token in self.stop_token_ids:
                    return (token,)
        return self.stop_token_ids[:1]

    def _text(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        # A tokenizer may close a text as well (EOS, [SEP]); a prompt is to be continued, so only BOS is taken over.
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        adds_bos = bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos]
        return (bos, *ids) if adds_bos else tuple(ids)

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, ValueError) as error:
            raise self._error(f"the template cannot be rendered ({error})") from error
        assert isinstance(rendered, str)
        return rendered

    def _check_template(self) -> None:
        if not self.is_plain and _PROBE not in self._render([{"role": "user", "content": _PROBE}]):
            raise self._error("the template does not show the content of a user message")

    def _error(self, constraint: str) -> UserError:
        return UserError(
            Problem(
                "model.chat_template",
                self._setting,
                constraint,
                "set model.chat_template=plain to join the messages' text, or give the path of a Jinja template",
            )
        )


def _read_template(chat_template: str) -> str:
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise UserError(
            Problem(
                "model.chat_template",
                chat_template,
                "it is neither a Jinja template nor the path of a file",
                "correct the path, or set model.chat_template=plain to join the messages' text",
            )
        )
    return path.read_text(encoding="utf-8")
