"""Requests and answers of /v1/completions, in the format of OpenAI's API, and of the tokenizer's endpoints."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator
from starlette.responses import JSONResponse

from flash_lm.inference.service.requests import Asked, SamplingAsked, Seed

MOST_TOP = 5  # likeliest tokens per position
_PROMPT = "must be a text, a list of texts, a list of token ids, or a list of such lists, none of them empty"
_MOST_STOPS, _LONGEST_STOP = 16, 200

Ids = list[int]
Prompt = str | list[str] | Ids | list[Ids]
Zero = Annotated[float, Field(ge=0, le=0)]  # a number without effect


class StreamOptions(Asked):
    """Options of a stream."""

    include_usage: bool = Field(False, description="a last event has the numbers of tokens")
    include_obfuscation: Literal[False] = Field(False, description="not supported")


class GeneratedAsked(SamplingAsked):
    """What requests for a continuation and for an answer in a chat share."""

    model: str | None = Field(None, max_length=1000, description="as /v1/models names it; default: what is served")
    n: int = Field(1, ge=1, le=64, description="samples of each prompt")
    seed: Seed | None = Field(None, description="random seed of sampling; default: another one for each request")
    stop: str | list[str] | None = Field(None, description="the text ends before the first of these texts")
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Zero = Field(0.0, description="not supported")
    frequency_penalty: Zero = Field(0.0, description="not supported")
    logit_bias: dict[str, Zero] = Field({}, description="not supported")
    user: str | None = Field(None, max_length=1000, description="not used")

    @field_validator("stop", mode="before")
    @classmethod
    def _few_short(cls, stop: Any) -> Any:
        # Each new piece of text is searched for each stop text.
        texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
        fine = isinstance(texts, list) and len(texts) <= _MOST_STOPS and all(map(_is_text, texts))
        if not fine or any(len(text) > _LONGEST_STOP for text in texts):
            raise ValueError(f"must be at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters")
        return stop

    @property
    def stops(self) -> list[str]:
        """The stop texts."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of a stream has the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionAsked(GeneratedAsked):
    """Texts to continue.

    `top_k`, `min_p` and `repetition_penalty` are not of OpenAI's API. Fields of that API that are not supported may
    only have the value that has no effect.
    """

    prompt: Prompt = Field(description="ids that do not begin with begin-of-text get it in front, as texts do")
    max_tokens: int = Field(16, ge=0, le=2**20, description="new tokens")
    echo: bool = Field(False, description="the prompt stands in front of the text")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP, description="log-probability of each token, and of so many likeliest; not streamed"
    )
    best_of: int | None = Field(None, ge=1, description="only n is supported")
    suffix: Literal[""] = Field("", description="not supported")

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_kind(cls, prompt: Any) -> Any:
        """Raises one sentence, instead of one per kind of prompt."""
        if not any(fits(prompt) for fits in (_is_text, _are(_is_text), _are_ids, _are(_are_ids))):
            raise ValueError(_PROMPT)
        return prompt

    @property
    def prompts(self) -> list[str | Ids]:
        """One or more, each a text or ids."""
        prompt: Any = self.prompt
        return [prompt] if _is_text(prompt) or _are_ids(prompt) else prompt


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and bool(x)


def _are(fits: Any) -> Any:
    return lambda x: isinstance(x, list) and bool(x) and all(map(fits, x))


def _is_id(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


_are_ids = _are(_is_id)


class Logprobs(BaseModel):
    """Scores of the tokens of a text, without begin-of-text put in front, with end-of-text if the model ended it."""

    tokens: list[str] = Field(description="texts; bytes:\\xe4 is a part of a character")
    token_logprobs: list[float | None] = Field(description="nats; null for a token with nothing before it")
    top_logprobs: list[dict[str, float] | None] | None = Field(description="of the likeliest, and of the token itself")
    text_offset: list[int] = Field(description="where each begins, in characters")


class Choice(BaseModel):
    """A continuation."""

    index: int = Field(description="prompts in their order, each with n samples")
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None = Field(
        None, description="stop: the model ended the text, or a stop text came; length: max_tokens; null: it goes on"
    )


class Usage(BaseModel):
    """Numbers of tokens of all prompts, as they were sent, and of all texts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """Continuations of prompts; an event of a stream has a piece of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ServedModel(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="when the service started, seconds since 1970")
    owned_by: Literal["flash_lm"] = "flash_lm"


class ServedModels(BaseModel):
    """All models, which are one."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


class TokenizeAsked(Asked):
    """A text whose tokens are asked for."""

    prompt: str = Field(max_length=100_000)
    add_special_tokens: bool = Field(True, description="begin-of-text in front")
    model: str | None = None


class Tokens(BaseModel):
    """The tokens of a text."""

    tokens: Ids
    count: int
    max_model_len: int = Field(description="most tokens of a prompt")


class DetokenizeAsked(Asked):
    """Tokens whose text is asked for."""

    tokens: Ids = Field(max_length=100_000)
    model: str | None = None


class Detokenized(BaseModel):
    """A text."""

    prompt: str


class TokenizerInfo(BaseModel):
    """The texts that /tokenize turns into special tokens, if a text consists of one of them."""

    bos_token: str
    eos_token: str


class ProblemDetail(BaseModel):
    """The problem of a request, and what to change."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: None = None
    code: Literal["context_length_exceeded", "invalid_api_key"] | None = None


class CompletionProblem(BaseModel):
    """A problem, as clients of OpenAI's API read it."""

    error: ProblemDetail | str = Field(description="a text if the request was refused before it was read")

    @classmethod
    def of(cls, status: int, message: str, **more: Any) -> "CompletionProblem":
        """The problem with the type for a status; `more` are further fields."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return cls(error=ProblemDetail(message=message, type=kind, **more))


def is_openai_path(path: str) -> bool:
    """Whether the answers of a path have the format of OpenAI's API."""
    return path.startswith("/v1/")


def too_long(message: str) -> JSONResponse:
    """The response to a prompt that is too long, with the status and the code that clients look for."""
    problem = CompletionProblem.of(400, message, code="context_length_exceeded")
    return JSONResponse(problem.model_dump(), 400)
