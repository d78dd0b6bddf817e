"""Turns chats into tokens with a model's chat template: prompts to answer, and chats to learn the answers of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flash_lm.data.chat_template import ChatTemplate, Message
from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError

ASSISTANT = "assistant"  # the role whose messages the model writes


class ChatTokens(NamedTuple):
    """The tokens of a chat.

    Attributes:
        ids: (n,) int32.
        is_answer: whether each is of an answer, up to its end token, (n,) bool.
    """

    ids: np.ndarray
    is_answer: np.ndarray


class ChatEncoder:
    """The chat template of a model with its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, name: str):
        """Compiles the template of the model `name`.

        Raises:
            InputError: there is none, it is no valid Jinja, or it ends answers with another token than end-of-text.
        """
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.chat_template is None:
            raise InputError(
                f"{name} has no chat template, for it is a base model, which only continues text: give it a text "
                "without chat, or use a model that was imported with its template, such as one named Instruct"
            )
        self._tokenizer, self._name = tokenizer, name
        self._template = ChatTemplate(
            tokenizer.chat_template, tokenizer.token(tokenizer.begin), tokenizer.token(tokenizer.end)
        )
        self._check_end()

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """The tokens of a chat with the beginning of an answer, (n,) int32.

        Args:
            messages: role and content of each message, the oldest first.

        Raises:
            InputError: there is no message, one is wrong or spells a special token, or the template refuses them.
        """
        checked = self._check(messages)
        ids = self._tokenizer.encode_marked([self._template.render(checked, add_generation_prompt=True)])[0].ids
        if not len(ids):
            raise InputError(f"the chat template of {self._name} writes nothing: give it another message")
        return ids

    def with_answers(self, messages: Sequence[Message]) -> ChatTokens:
        """The tokens of a complete chat, and which of them are answers.

        Args:
            messages: role and content of each message, at least one of the assistant.

        Raises:
            InputError: as `prompt`; no message is an answer, or the template does not tell where answers are.
        """
        checked = self._check(messages)
        numbers = [i for i, message in enumerate(checked) if message["role"] == ASSISTANT]
        if not numbers:
            raise InputError(f"no message has the role {ASSISTANT}, so there is no answer to learn")
        # What the template adds for an answer, to the chat before it, is the answer.
        text = self._template.render(checked, add_generation_prompt=False)
        spans = []
        for i in numbers:
            before = self._template.render(checked[:i], add_generation_prompt=True)
            after = self._template.render(checked[: i + 1], add_generation_prompt=False)
            if not (after.startswith(before) and text.startswith(after)):
                raise InputError(
                    f"the chat template of {self._name} writes a message in another way once the next ones follow, so "
                    f"that message {i + 1} cannot be found in the text: use a template that only appends"
                )
            spans.append((len(before), len(after)))
        # Whatever stands after the end token, such as a line end, is written by the template.
        ids, starts = self._tokenizer.encode_marked([text])[0]
        is_answer = np.zeros(len(ids), bool)
        for span in spans:
            first, last = np.searchsorted(starts, span)
            ends = np.flatnonzero(ids[first:last] == self._tokenizer.end)
            is_answer[first : first + ends[-1] + 1 if len(ends) else last] = True
        return ChatTokens(ids, is_answer)

    def _check_end(self) -> None:
        """Raises InputError if answers end with another token than texts: the model would not stop at its own."""
        question, answer = {"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}
        try:
            before = self._template.render([question], add_generation_prompt=True)
            after = self._template.render([question, answer], add_generation_prompt=False)
        except InputError:  # it wants other chats, and is known only when it has one
            return
        ids = self._tokenizer.encode_marked([after.removeprefix(before)])[0].ids
        if (special := self._tokenizer.special_tokens(ids)) and self._tokenizer.end not in ids:
            raise InputError(
                f"the chat template of {self._name} ends an answer with {special[-1]}, and its tokenizer a text with "
                f"{self._tokenizer.token(self._tokenizer.end)}: set eos_token to {special[-1]} in the "
                "tokenizer_config.json of the downloaded model, and import it again"
            )

    def _check(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Checks that messages are text, and that none of them could be read as the end of a turn."""
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise InputError('a chat is a list of messages, one or more, such as {"role": "user", "content": "Hello"}')
        checked = [_checked(number, message) for number, message in enumerate(messages, start=1)]
        texts = [text for message in checked for text in message.values()]
        for number, (text, marked) in enumerate(zip(texts, self._tokenizer.encode_marked(texts), strict=True)):
            special = self._tokenizer.special_tokens(marked.ids)
            if not special:
                continue
            # The token that stands for anything unknown is special, too.
            what = f"message {number // 2 + 1}"
            if spelled := [token for token in special if token in text]:
                raise InputError(f"{what} spells {spelled[0]}, a special token of {self._name}: take it out")
            raise InputError(f"the tokenizer of {self._name} does not know a part of {what}: take it out")
        return checked


def _checked(number: int, message: Any) -> dict[str, str]:
    """Role and content of a message; raises InputError if it has anything else."""
    given = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if given.keys() != {"role", "content"} or not all(isinstance(value, str) for value in given.values()):
        raise InputError(
            f"message {number} must have a role and a content, both texts, and nothing else, such as "
            '{"role": "user", "content": "Hello"}'
        )
    for key, value in given.items():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the {key} of message {number} is not UTF-8 text at character {error.start + 1}"
            ) from None
    return {"role": given["role"], "content": given["content"]}
