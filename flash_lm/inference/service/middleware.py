"""What every request passes on its way to its answer."""

import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flash_lm.inference.service.metrics import Metrics

_MOST_BYTES = 2_000_000  # of a request: more than the longest text, each character written as an escape


class Bounded:
    """Refuses requests that are too large to read."""

    def __init__(self, app: ASGIApp):
        """Around an app."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HTTPException, in the app that reads, once too much has come."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            received += len((message := await receive()).get("body", b""))
            if received > _MOST_BYTES:
                raise HTTPException(413, f"a request of more than {_MOST_BYTES:,} bytes: shorten it")
            return message

        await self._app(scope, bounded, send)


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
