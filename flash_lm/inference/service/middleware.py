"""ASGI middleware: size and time limits, allowed host names, delayed refusals, and metrics."""

import asyncio
import contextlib
import ipaddress
import time
import urllib.parse

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash_lm.inference.service.completion_format import is_openai_path, too_long
from flash_lm.inference.service.metrics import Metrics

BODY_SECONDS = 10  # time limit for a complete request to arrive
REFUSALS_A_SECOND = 20  # for all clients together; a burst of this many is answered at once
_LONGEST_WAIT = 1.0  # largest delay of a refusal, in seconds
_MOST_HELD = 256  # delayed refusals; each uses some memory


class BodyLimit:
    """Refuses requests that are too large, or that arrive too slowly."""

    def __init__(self, app: ASGIApp, most_bytes: int):
        """Wraps an app that reads bodies of at most `most_bytes` bytes."""
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 413 if Content-Length is too large; else raises HTTPException in the app while it reads."""
        # The header is checked first, so that a large body is refused before it is read.
        problem = f"the request has more than {self._most_bytes:,} bytes: shorten it"
        promised = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if promised.isdecimal() and int(promised) > self._most_bytes:
            sentence = f"a request of {int(promised):,} bytes is over the limit of {self._most_bytes:,}: shorten it"
            refusal = too_long(sentence) if is_openai_path(scope["path"]) else JSONResponse({"error": sentence}, 413)
            refusal.headers["Connection"] = "close"
            return await refusal(scope, receive, send)

        # A client may send more than it has promised, or send slowly: the app's reads are limited.
        received, complete, until = 0, False, time.monotonic() + BODY_SECONDS

        async def limited_receive() -> Message:
            nonlocal received, complete
            if complete:  # only the end of the connection can follow
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS} s: send it again") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._most_bytes:
                raise HTTPException(413, problem)
            return message

        await self._app(scope, limited_receive, send)


class AllowedHosts:
    """Answers only requests to allowed host names, so that no web page reaches the service by DNS rebinding.

    An IP address is always accepted: a web page cannot redirect one.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]):
        """Wraps an app that has these names."""
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 400 for any other name."""
        if scope["type"] != "http" or (name := _name(scope)) in self._names or _is_address(name):
            return await self._app(scope, receive, send)
        problem = f"this service is not {name}: start it with a further --host={name}"
        if name is None:
            problem = "the request has no host: send the header Host"
        await JSONResponse({"error": problem}, 400)(scope, receive, send)


class RefusalDelay:
    """Delays refusals when there are many, so that clients that retry at once cannot keep the service busy."""

    def __init__(self, app: ASGIApp):
        """Wraps an app whose 4xx answers are refusals, except 499: the client has left."""
        self._app, self._due, self._held = app, 0.0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Delays refusals; other answers pass unchanged."""

        async def delayed_send(message: Message) -> None:
            if message["type"] == "http.response.start" and 400 <= message["status"] < 499:
                # Beyond a number of delayed refusals, memory counts more than the delay.
                wait = self._wait()
                if self._held < _MOST_HELD:
                    self._held += 1
                    try:
                        await asyncio.sleep(wait)
                    finally:
                        self._held -= 1
            await send(message)

        await self._app(scope, receive, delayed_send)

    def _wait(self) -> float:
        """The delay in seconds, from a leaky bucket that holds the refusals of one second."""
        # Each refusal fills the bucket by its share of a second; an idle second empties it.
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + 1.0 / REFUSALS_A_SECOND
        self._due = min(self._due, now + _LONGEST_WAIT)
        return max(0.0, self._due - now)


def _name(scope: Scope) -> str | None:
    """The requested host's name, without its port."""
    with contextlib.suppress(ValueError):  # brackets without an address
        return (urllib.parse.urlsplit("//" + Headers(scope=scope).get("host", "")).hostname or "").rstrip(".") or None


def _is_address(name: str | None) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name or ""))
    return False


class RequestMetrics:
    """Counts answers and measures how long each took, to the end of its stream."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        """Wraps an app; `metrics` has the counters."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts the request, whether the app answers or raises."""
        # The status is seen on its way out; an answer that raises counts as 500.
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, status = time.perf_counter(), 500

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - start)
