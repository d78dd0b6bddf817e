"""Turns chats into tokens with a model's chat template: prompts to answer, and chats to learn the answers of."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flash_lm.data.chat_template import ChatTemplate, Message
from flash_lm.data.foreign_tokenizer import HuggingFaceTokenizer, Marked
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.errors import InputError

ASSISTANT = "assistant"  # the role whose messages the model writes


class ChatTokens(NamedTuple):
    """The tokens of a chat.

    Attributes:
        ids: (n,) int32.
        is_answer: whether each is of an answer that can be learnt, up to its end token, (n,) bool.
        only_last: whether that is the last answer alone, since the template changes earlier ones.
    """

    ids: np.ndarray
    is_answer: np.ndarray
    only_last: bool


class ChatEncoder:
    """The chat template of a model with its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, name: str):
        """Compiles the template of the model `name`.

        Raises:
            InputError: there is none, it is no valid Jinja, or it ends answers with another token than end-of-text.
        """
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.chat_template is None:
            raise InputError(
                f"{name} has no chat template: give it a text without chat, or use a model that was imported with its "
                "template, such as one named Instruct"
            )
        self._tokenizer, self._name = tokenizer, name
        begin = tokenizer.token(tokenizer.begin) if tokenizer.has_begin else None
        self._template = ChatTemplate(tokenizer.chat_template, begin, tokenizer.token(tokenizer.end))
        self._check_end()

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """The tokens of a chat with the beginning of an answer, (n,) int32.

        Args:
            messages: role and content of each message, the oldest first.

        Raises:
            InputError: there is no message, one is wrong or spells a special token, the template refuses them, or it
                makes a special token of them.
        """
        checked = self._check(messages)
        ids = self._encode(self._template.render(checked, add_generation_prompt=True), checked, prompts=True).ids
        if not len(ids):
            raise InputError(f"the chat template of {self._name} writes nothing: give it another message")
        return ids

    def with_answers(self, messages: Sequence[Message]) -> ChatTokens:
        """The tokens of a complete chat up to its last answer, and which of them are answers to learn.

        These are all answers, or the last one if the template writes others in another way once messages follow, such
        as without their reasoning.

        Args:
            messages: role and content of each message, at least one of the assistant.

        Raises:
            InputError: as `prompt`; no message is an answer, or the template does not tell where the last one begins.
        """
        checked = self._check(messages)
        numbers = [i for i, message in enumerate(checked) if message["role"] == ASSISTANT]
        if not numbers:
            raise InputError(f"no message has the role {ASSISTANT}, so there is no answer to learn")
        # What the template adds for an answer, to the chat before it, is the answer.
        checked = checked[: numbers[-1] + 1]
        text = self._template.render(checked, add_generation_prompt=False)
        spans = [self._answer(checked[: i + 1], text) for i in numbers]
        if spans[-1] is None:
            raise InputError(
                f"the chat template of {self._name} writes the messages before an answer in another way once the "
                f"answer follows, so that message {numbers[-1] + 1} cannot be found in the text: use a template that "
                "only appends"
            )
        found = [span for span in spans if span is not None]
        only_last = len(found) < len(spans)
        # Whatever stands after the end token, such as a line end, is written by the template.
        ids, starts = self._encode(text, checked, prompts=False)
        is_answer = np.zeros(len(ids), bool)
        for span in found[-1:] if only_last else found:
            first, last = np.searchsorted(starts, span)
            ends = np.flatnonzero(ids[first:last] == self._tokenizer.end)
            is_answer[first : first + ends[-1] + 1 if len(ends) else last] = True
        return ChatTokens(ids, is_answer, only_last)

    def _answer(self, chat: list[dict[str, str]], text: str) -> tuple[int, int] | None:
        """Where the last message of a chat begins and ends in a text; None: the template tells nothing of it."""
        before = self._template.render(chat[:-1], add_generation_prompt=True)
        after = self._template.render(chat, add_generation_prompt=False)
        return (len(before), len(after)) if after.startswith(before) and text.startswith(after) else None

    def _encode(self, text: str, chat: list[dict[str, str]], *, prompts: bool) -> Marked:
        """The tokens of a rendered chat.

        Raises:
            InputError: the contents have become special tokens in the template, which may edit them.
        """
        # With other contents, the template must write as many special tokens.
        plain = [message | {"content": "a" if message["content"].strip() else message["content"]} for message in chat]
        neutral = self._template.render(plain, add_generation_prompt=prompts)
        marked, expected = self._tokenizer.encode_marked([text, neutral])
        special, usual = (Counter(self._tokenizer.special_tokens(x.ids)) for x in (marked, expected))
        if more := special - usual:
            raise InputError(
                f"the chat template of {self._name} makes a special token, {next(iter(more))}, of the content of a "
                "message: take out what looks like it"
            )
        return marked

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
                f"{self._tokenizer.token(self._tokenizer.end)}: import the model's folder, not a GGUF file, with "
                f"eos_token set to {special[-1]} in its tokenizer_config.json"
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
