"""Error responses of the service: a status and a sentence."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from flash_lm.errors import InputError, TooLongError
from flash_lm.inference.service.completion_format import CompletionProblem, is_openai_path, too_long
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.requests import Problem
from flash_lm.inference.service.scheduler import BusyError, ClosedError, FailedError
from flash_lm.inference.service.security import HEADERS

Answer = TypeVar("Answer")
_CLIENT_LEFT = 499
_LONGEST_SENTENCE = 500  # characters: names in a request may have any length
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "Not UTF-8, or unknown host name"},
    401: {"model": Problem, "description": "No API key, or a wrong one"},
    408: {"model": Problem, "description": "Received too slowly"},
    411: {"model": Problem, "description": "Chunked request"},
    413: {"model": Problem, "description": "Too large"},
    422: {"model": Problem, "description": "Bad input"},
    500: {"model": Problem, "description": "The model failed"},
    503: {"model": Problem, "description": "Busy, or shutting down"},
    504: {"model": Problem, "description": "Took too long"},
}
STATUS = {InputError: 422, TooLongError: 422, FailedError: 500, BusyError: 503, ClosedError: 503, TimeoutError: 504}


class LeftError(Exception):
    """The client has closed its connection."""


async def run_while_connected(request: Request, answer: Awaitable[Answer], limits: Limits) -> Answer:
    """Awaits the answer; cancels it if it takes too long or the client leaves."""

    # The only message after a complete request is that of its end.
    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    # Whichever ends first: the answer, the client, or the time.
    work, leaving = tasks = asyncio.ensure_future(answer), asyncio.ensure_future(wait_for_disconnect())
    try:
        async with asyncio.timeout(limits.seconds):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if leaving in done and work not in done:
        raise LeftError
    return work.result()


def problem(error: Exception, limits: Limits) -> tuple[int, str]:
    """The status and the message of an error."""
    if isinstance(error, TimeoutError):
        return 504, f"this took longer than {limits.seconds:g} s: ask for fewer tokens, or try again later"
    return STATUS[type(error)], "; ".join(str(error).splitlines())


def add_errors(app: FastAPI, limits: Limits) -> None:
    """Adds handlers that answer every error with a message."""

    def answer(request: Request, status: int, text: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        if is_openai_path(request.url.path):
            return JSONResponse(CompletionProblem.of(status, text).model_dump(), status, headers)
        return JSONResponse(Problem(error=text).model_dump(), status, headers)

    async def sentence(request: Request, error: Exception) -> JSONResponse:
        status, text = problem(error, limits)
        if isinstance(error, TooLongError) and is_openai_path(request.url.path):
            return too_long(text)
        return answer(request, status, text, {"Retry-After": "1"} if status == 503 else None)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        # One sentence per field that is wrong, named by its path.
        messages = []
        for detail in error.errors():
            no_json = detail["type"] == "json_invalid"  # its location is a position in the body
            where = "the body" if no_json else ".".join(str(x) for x in detail["loc"][1:]) or "the body"
            messages.append(f"{where}: {detail['msg']}" + (f" at character {detail['loc'][1]}" if no_json else ""))
        return answer(request, 422, " ".join("; ".join(messages).split())[:_LONGEST_SENTENCE])

    async def other(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return answer(request, error.status_code, error.detail, error.headers)

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_LEFT)  # nobody reads it

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # This answer does not pass the middleware, so the headers are added here.
        return answer(request, 500, "the service has a bug: see its log", HEADERS)

    for kind in STATUS:
        app.add_exception_handler(kind, sentence)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)
    app.add_exception_handler(LeftError, left)
    app.add_exception_handler(Exception, unexpected)
