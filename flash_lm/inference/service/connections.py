"""Connections that keep the service waiting are closed: each holds a socket, and there are only so many."""

import asyncio
import itertools
import json
import resource
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10  # in which the head of the next request must have come
READ_SECONDS = 10  # in which a client must read some of what it has been sent
_LONGEST_HEAD = 1 << 14  # bytes
_HELD_SECONDS = 1.0
_CHUNKS = "a request in chunks: send it whole, with its Content-Length"
_FILES = 64  # that a process needs beside its connections
_turns = itertools.count()  # loop.time() is the same for what happens in a millisecond
CONNECTIONS = min(1024, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _FILES))  # at a time


def server(app: Any, seconds: float, port: int = 0) -> uvicorn.Server:
    """A server of an app; those who have not heard after so many seconds, when it ends, are cut off."""
    # A little more than a request may take, so that whoever takes too long hears of it.
    config = uvicorn.Config(app, port=port, log_level="error", http=Patient, timeout_graceful_shutdown=int(seconds) + 1)
    return uvicorn.Server(config)


class _Whole(h11.Connection):
    """Takes requests in chunks for none: a million chunks of a byte would keep the event loop busy."""

    in_chunks = False

    def next_event(self) -> Any:
        """Raises RemoteProtocolError for them, before anything else of them is looked at."""
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            self.in_chunks = True
            raise h11.RemoteProtocolError(_CHUNKS)
        return event


class Patient(H11Protocol):
    """HTTP as uvicorn speaks it, with limits to its patience."""

    def __init__(self, *words: Any, **more: Any):
        """As uvicorn makes one."""
        super().__init__(*words, **more)
        self.conn = _Whole(h11.SERVER, _LONGEST_HEAD)
        self._silence: asyncio.TimerHandle | None = None  # timers, of what else ends the connection
        self._stuck: asyncio.TimerHandle | None = None
        self._answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for a request; when there are too many, whoever has said nothing for longest has to go."""
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > CONNECTIONS:
            silent = [other for other in self.connections if isinstance(other, Patient) and other.is_silent]
            min(silent, key=lambda other: other.silent_since).transport.abort()  # there is one: this

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        for timer in (self._silence, self._stuck, self._answer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Waits for the next request; what is left of this one is not read."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        self._await_request()  # before the next one begins, if it is there already
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request that the app could get, a little later, so that it does not come at once again."""
        self.flow.pause_reading()
        self._answer = self.loop.call_later(_HELD_SECONDS, self._refuse)

    def _refuse(self) -> None:
        status, error = (411, _CHUNKS) if self.conn.in_chunks else (400, "no HTTP: send a request")
        body = json.dumps({"error": error}).encode()
        fields = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (h11.Response(status_code=status, headers=fields), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        """Ends after the answer that runs; whoever has none goes at once."""
        if self.is_silent:
            self.transport.abort()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Gives the client some time to read."""
        super().pause_writing()
        self._stuck = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        if self._stuck:
            self._stuck.cancel()
        super().resume_writing()

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is self._before

    def _await_request(self) -> None:
        self._before, self.silent_since = self.cycle, next(_turns)
        if self._silence:
            self._silence.cancel()
        self._silence = self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.is_silent:
            self.transport.abort()
