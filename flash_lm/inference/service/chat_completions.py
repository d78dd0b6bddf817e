"""Answers /v1/chat/completions in the format of OpenAI's API: a chat as the model's template writes it, continued."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.service.chat_format import (
    AnswerMessage,
    ChatAsked,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
)
from flash_lm.inference.service.choices import Choices, ChoiceState, EncodedPrompt
from flash_lm.inference.service.completion_format import Usage
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.services import TextService


class ChatCompletions:
    """Answers chats.

    Attributes:
        problem: why the model cannot chat; None: it can.
    """

    def __init__(self, trained: TrainedModel, service: TextService, limits: Limits):
        """Compiles the chat template, if there is one."""
        self._trained, self._limits, self._choices = trained, limits, Choices(trained, service, limits)
        self.problem: str | None = None
        try:
            self._encoder = trained.chat_encoder
        except InputError as error:
            self.problem = str(error)

    def check(self, asked: ChatAsked) -> list[ChoiceState]:
        """Makes the choices of a request; raises InputError if it is refused, and as `Scheduler.check` does."""
        # The size is checked before anything is rendered or tokenised.
        messages = [message.text() for message in asked.messages]
        self._limits.check_text("a chat", "".join(message["content"] for message in messages), self._trained)
        self._choices.check_count(asked.n)
        ids = self._encoder.prompt(messages).tolist()
        return self._choices.make([EncodedPrompt(ids)], asked, asked.new_tokens())

    async def answer(self, asked: ChatAsked, choices: Sequence[ChoiceState]) -> bytes:
        """Generates the choices from `check`, and returns the complete answer as JSON."""
        async for _ in self._choices.generate(choices):
            pass
        usage = await self._usage(asked, choices)
        formatted = [
            ChatChoice(
                index=choice.index, message=AnswerMessage(content=choice.text), finish_reason=choice.finish_reason
            )
            for choice in choices
        ]
        return ChatCompletion(**self._about(), choices=formatted, usage=usage).model_dump_json().encode()

    async def stream(self, asked: ChatAsked, choices: Sequence[ChoiceState]) -> AsyncIterator[ChatChunk]:
        """Generates the choices from `check`, and yields events: the role of each, pieces of text, why it ended."""
        about = self._about()
        make_event = lambda choice, why=None, **delta: ChatChunk(
            **about, choices=[ChunkChoice(index=choice.index, delta=Delta(**delta), finish_reason=why)]
        )
        for choice in choices:
            yield make_event(choice, role="assistant", content="")
        async for choice, piece, ended in self._choices.generate(choices):
            if piece:
                yield make_event(choice, content=piece)
            if ended:
                yield make_event(choice, choice.finish_reason)
        # At the end the numbers of tokens, if the client wants them.
        if asked.wants_usage:
            yield ChatChunk(**about, choices=[], usage=await self._usage(asked, choices))

    async def _usage(self, asked: ChatAsked, choices: Sequence[ChoiceState]) -> Usage:
        """The numbers of tokens, counted in a thread, for a stop text makes it decode them again."""
        count = lambda: self._choices.usage(asked, choices, [self._choices.kept_tokens(choice) for choice in choices])
        return await asyncio.to_thread(count)

    def _about(self) -> dict[str, Any]:
        """The id of one request, and what is the same in its answer or its events."""
        return {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._trained.name}
