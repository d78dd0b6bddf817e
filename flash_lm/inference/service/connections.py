"""Time limits of connections: each uses a socket, and their number is limited."""

import asyncio
import itertools
import json
import resource
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flash_lm.inference.service.security import HEADERS

HEAD_SECONDS = 10  # time limit for the head of the next request to arrive
READ_SECONDS = 10  # time limit for a client to read some of the data that was sent
_LONGEST_HEAD = 1 << 14  # bytes
_HELD_SECONDS = 1.0
_CHUNKS = "chunked requests are not supported: send the complete body with a Content-Length"
_FILES = 64  # file descriptors that the process needs besides its connections
_turns = itertools.count()  # loop.time() does not order events within a millisecond
CONNECTIONS = min(1024, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _FILES))  # at a time


def server(app: Any, seconds: float, port: int = 0) -> uvicorn.Server:
    """Makes the server of an app; at shutdown, requests that take longer than `seconds` are cut off."""
    # A little more than the time limit of a request, so that a client whose request times out gets the error.
    config = uvicorn.Config(
        app, port=port, log_level="error", http=TimeoutProtocol, timeout_graceful_shutdown=int(seconds) + 1
    )
    return uvicorn.Server(config)


class _NoChunks(h11.Connection):
    """An HTTP connection without chunked requests: a million chunks of one byte would keep the event loop busy."""

    in_chunks = False

    def next_event(self) -> Any:
        """Raises RemoteProtocolError for a chunked request, before its body is read."""
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            self.in_chunks = True
            raise h11.RemoteProtocolError(_CHUNKS)
        return event


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with time limits for slow clients."""

    def __init__(self, *words: Any, **more: Any):
        """Takes uvicorn's arguments."""
        super().__init__(*words, **more)
        self.conn = _NoChunks(h11.SERVER, _LONGEST_HEAD)
        self._silence: asyncio.TimerHandle | None = None  # timers that close the connection
        self._stuck: asyncio.TimerHandle | None = None
        self._answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for a request; if there are too many connections, closes the one that has been silent longest."""
        # A new connection must not be refused because of idle ones.
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > CONNECTIONS:
            silent = [other for other in self.connections if isinstance(other, TimeoutProtocol) and other.is_silent]
            oldest = min(silent, key=lambda other: other.silent_since)  # never empty: this connection is silent
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers."""
        for timer in (self._silence, self._stuck, self._answer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Waits for the next request; the rest of this one is not read."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        self._await_request()  # before the next request begins, which may have arrived already
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers an invalid request after a short delay, so that the client cannot retry at once."""
        self.flow.pause_reading()
        self._answer = self.loop.call_later(_HELD_SECONDS, self._refuse)

    def _refuse(self) -> None:
        """Writes the response to an invalid request, which the app never sees, and closes the connection."""
        status, error = (411, _CHUNKS) if self.conn.in_chunks else (400, "this is not HTTP: send an HTTP request")
        body = json.dumps({"error": error}).encode()
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        fields += HEADERS.items()
        for event in (h11.Response(status_code=status, headers=fields), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        """Closes the connection after the current answer, or at once if it is idle."""
        if self.is_silent:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Gives the client READ_SECONDS to read."""
        super().pause_writing()
        self._stuck = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the timer: the client has read."""
        if self._stuck:
            self._stuck.cancel()
        super().resume_writing()

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is self._before

    def _await_request(self) -> None:
        """Starts the timer for the next request; until it arrives, the connection is silent."""
        self._before, self.silent_since = self.cycle, next(_turns)
        if self._silence:
            self._silence.cancel()
        self._silence = self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.is_silent:
            self.transport.abort()
