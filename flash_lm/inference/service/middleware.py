"""What every request passes on its way to its answer."""

import asyncio
import contextlib
import ipaddress
import time
import urllib.parse

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash_lm.inference.service.metrics import Metrics

BODY_SECONDS = 10  # in which all of a request must have come
REFUSALS_A_SECOND = 20  # for all clients together; a burst of as many is answered at once
_LONGEST_WAIT = 1.0  # seconds that a refusal is held back, however many there are
_MOST_HELD = 256  # refusals; each takes some memory


class Bounded:
    """Refuses requests that are too large to read, or too slow to come."""

    def __init__(self, app: ASGIApp, most_bytes: int):
        """Around an app that reads bodies of so many bytes at most."""
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 413 to what says that it is too large; raises HTTPException, in the app that reads, for the rest."""
        told = f"a request of more than {self._most_bytes:,} bytes: shorten it"
        promised = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if promised.isdecimal() and int(promised) > self._most_bytes:
            return await JSONResponse({"error": told}, 413, {"Connection": "close"})(scope, receive, send)
        received, complete, until = 0, False, time.monotonic() + BODY_SECONDS

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:  # what comes then is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, f"a request must come within {BODY_SECONDS} s: send it again") from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._most_bytes:
                raise HTTPException(413, told)
            return message

        await self._app(scope, bounded, send)


class Named:
    """Answers requests to the names of the service alone, so that no web page reaches it by a name of its own.

    An address is no name: no page has one that leads elsewhere.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]):
        """Around an app that has these names."""
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 400 for another name (DNS rebinding)."""
        if scope["type"] != "http" or (name := _name(scope)) in self._names or _is_address(name):
            return await self._app(scope, receive, send)
        told = f"this service is not {name}: add --host={name} to its other --host to make it so"
        if name is None:
            told = "a request without a host: send the header Host"
        await JSONResponse({"error": told}, 400)(scope, receive, send)


class Slow:
    """Holds refusals back when there are many, so that whoever asks again at once cannot keep the service busy."""

    def __init__(self, app: ASGIApp):
        """Around an app whose answers of 4xx are refusals; of 499 the client has left."""
        self._app, self._due, self._held = app, 0.0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Other answers pass as they come."""

        async def slowly(message: Message) -> None:
            if message["type"] == "http.response.start" and 400 <= message["status"] < 499:
                wait = self._wait()
                if self._held < _MOST_HELD:
                    self._held += 1
                    try:
                        await asyncio.sleep(wait)
                    finally:
                        self._held -= 1
            await send(message)

        await self._app(scope, receive, slowly)

    def _wait(self) -> float:
        """Seconds: a bucket of one second's refusals, that drains by itself."""
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + 1.0 / REFUSALS_A_SECOND
        self._due = min(self._due, now + _LONGEST_WAIT)
        return max(0.0, self._due - now)


def _name(scope: Scope) -> str | None:
    """Of the host that is asked, without its port."""
    with contextlib.suppress(ValueError):  # brackets without an address
        return (urllib.parse.urlsplit("//" + Headers(scope=scope).get("host", "")).hostname or "").rstrip(".") or None


def _is_address(name: str | None) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name or ""))
    return False


class Counting:
    """Counts answers and measures how long each took, to the end of its stream."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        """Around an app, and with the metrics to count in."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts, whether the app answers or raises."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - start)
