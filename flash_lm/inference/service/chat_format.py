"""Requests and answers of /v1/chat/completions, in the format of OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from flash_lm.data.chat_template import Message
from flash_lm.errors import InputError
from flash_lm.inference.service.completion_format import GeneratedAsked, Usage
from flash_lm.inference.service.requests import Asked

_MOST_MESSAGES = 10_000  # the size of a request is bounded besides
_LONGEST = 100_000  # characters
Nothing = Annotated[list[Any], Field(max_length=0)]


class TextPart(Asked):
    """A piece of the text of a message."""

    type: Literal["text"]
    text: str = Field(max_length=_LONGEST)


class ChatMessage(Asked):
    """A message of a chat; it may be an answer of this API as a client returns it."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Field(max_length=_LONGEST)] | list[TextPart] = Field(
        description="a text that spells no special token of the tokenizer, or pieces of it"
    )
    refusal: None = Field(None, description="not supported")
    annotations: Nothing = Field([], description="not supported")
    audio: None = Field(None, description="not supported")
    function_call: None = Field(None, description="not supported")
    tool_calls: Nothing = Field([], description="not supported")

    def text(self) -> Message:
        """Role and content for a chat template."""
        whole = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": whole}


class AnswerFormat(Asked):
    """What an answer must be: any text."""

    type: Literal["text"]


class ChatAsked(GeneratedAsked):
    """A chat whose next message is asked for.

    `top_k`, `min_p` and `repetition_penalty` are not of OpenAI's API. Fields of that API that are not supported may
    only have the value that has no effect.
    """

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST_MESSAGES, description="the oldest first")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**20, description="new tokens; default: as many as the service allows"
    )
    max_tokens: int | None = Field(None, ge=1, le=2**20, description="the older name of max_completion_tokens")
    logprobs: Literal[False] = Field(False, description="not supported")
    top_logprobs: int = Field(0, ge=0, le=0, description="not supported")
    tools: Nothing = Field([], description="not supported")
    tool_choice: Literal["none", "auto"] = Field("none", description="not supported")
    response_format: AnswerFormat | None = None
    store: Literal[False] = Field(False, description="not supported")

    def new_tokens(self) -> int | None:
        """Largest number of new tokens; None: not said.

        Raises:
            InputError: its two names have different values.
        """
        given = {x for x in (self.max_completion_tokens, self.max_tokens) if x is not None}
        if len(given) > 1:
            raise InputError(
                f"max_completion_tokens={self.max_completion_tokens} and max_tokens={self.max_tokens} mean the same: "
                "leave one out"
            )
        return next(iter(given), None)


class AnswerMessage(BaseModel):
    """The message of the model."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"] = Field(
        description="stop: the model ended its message, or a stop text came; length: the largest number of tokens"
    )
    logprobs: None = None


class ChatCompletion(BaseModel):
    """Answers to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What an event adds to a message: its role at first, then pieces of its text, nothing at the end."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Clients read a key that is there as an addition, also if it is null."""
        return {key: value for key, value in dump(self).items() if value is not None}


class ChunkChoice(BaseModel):
    """A piece of an answer."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: None = None


class ChatChunk(BaseModel):
    """An event of a stream; the last one may have the numbers of tokens and no choice."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
