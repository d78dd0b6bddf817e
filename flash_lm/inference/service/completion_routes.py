"""The endpoints of OpenAI's API, for completions and chats, and those of a tokenizer."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from flash_lm.inference.model import TrainedModel
from flash_lm.inference.service.chat_completions import ChatCompletions
from flash_lm.inference.service.chat_format import ChatAsked, ChatCompletion
from flash_lm.inference.service.completion_format import (
    Completion,
    CompletionAsked,
    CompletionProblem,
    DetokenizeAsked,
    Detokenized,
    ServedModel,
    ServedModels,
    TokenizeAsked,
    TokenizerInfo,
    Tokens,
)
from flash_lm.inference.service.completions import Completions
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.problems import PROBLEMS, STATUS, problem, run_while_connected

_NO_MODEL: dict[int | str, dict[str, Any]] = {404: {"model": CompletionProblem, "description": "Another model"}}
_BAD = {
    400: {
        "model": CompletionProblem,
        "description": "Prompt too long, not UTF-8, unknown host name, or a model that cannot chat",
    }
}
_PROBLEMS = {status: about | {"model": CompletionProblem} for status, about in PROBLEMS.items()} | _NO_MODEL | _BAD
_EVENTS = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


def add_models(app: FastAPI, trained: TrainedModel) -> None:
    """Adds /v1/models to the service of any model."""
    # Clients of OpenAI's API look up the name of the model.
    model = ServedModel(id=trained.name, created=int(time.time()))

    @app.get("/v1/models")
    async def models() -> ServedModels:
        """The models that are served: one."""
        return ServedModels(data=[model])

    @app.get("/v1/models/{name:path}", responses=_NO_MODEL)
    async def one_model(name: str) -> ServedModel:
        """The model of this name."""
        _check_name(name, trained)
        return model


def add_completions(app: FastAPI, completions: Completions, trained: TrainedModel, limits: Limits) -> None:
    """Adds /v1/completions and the endpoints of the tokenizer."""

    @app.post("/v1/completions", response_model=Completion, responses=_PROBLEMS | {200: _EVENTS})
    async def complete(asked: CompletionAsked, request: Request) -> Any:
        """Continues texts, or scores them (echo, logprobs); as server-sent events with stream, up to [DONE]."""
        # Checks raise before anything is generated; they tokenise, so they run in a thread.
        _check_name(asked.model, trained)
        choices = await asyncio.to_thread(completions.check, asked)
        if asked.stream:
            return _stream(completions.stream(asked, choices), limits)
        answer = await run_while_connected(request, completions.answer(asked, choices), limits)
        return Response(answer, media_type="application/json")

    @app.post("/tokenize", responses=PROBLEMS)
    async def tokenize(asked: TokenizeAsked) -> Tokens:
        """The tokens of a text."""
        return await asyncio.to_thread(completions.tokenize, asked)

    @app.post("/detokenize", responses=PROBLEMS)
    async def detokenize(asked: DetokenizeAsked) -> Detokenized:
        """The text of tokens."""
        return completions.detokenize(asked.tokens)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        """The texts that /tokenize turns into special tokens."""
        return completions.tokenizer_info()


def add_chat(app: FastAPI, chats: ChatCompletions, trained: TrainedModel, limits: Limits) -> None:
    """Adds /v1/chat/completions."""

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_PROBLEMS | {200: _EVENTS})
    async def chat(asked: ChatAsked, request: Request) -> Any:
        """Answers the last message of a chat; as server-sent events with stream, up to [DONE]."""
        _check_name(asked.model, trained)
        if chats.problem:
            raise HTTPException(400, chats.problem)
        choices = await asyncio.to_thread(chats.check, asked)
        if asked.stream:
            return _stream(chats.stream(asked, choices), limits)
        answer = await run_while_connected(request, chats.answer(asked, choices), limits)
        return Response(answer, media_type="application/json")


def _stream(chunks: AsyncIterator[BaseModel], limits: Limits) -> StreamingResponse:
    """Server-sent events; once the stream has begun, its status is 200, so that errors become events, too."""

    async def events() -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(limits.seconds):
                async for chunk in chunks:
                    yield f"data: {chunk.model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"
        except tuple(STATUS) as error:
            yield f"data: {CompletionProblem.of(*problem(error, limits)).model_dump_json()}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _check_name(name: str | None, trained: TrainedModel) -> None:
    if name not in (None, trained.name):
        raise HTTPException(404, f"no model {name[:100]}: this service has {trained.name}")
