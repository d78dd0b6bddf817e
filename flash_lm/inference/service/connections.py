"""Connections that say nothing are closed: each holds a socket, and there are only so many."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10  # in which the head of the first request must have come


class Patient(H11Protocol):
    """HTTP as uvicorn speaks it, with a limit to its patience; it closes what is idle after an answer by itself."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait."""
        super().connection_made(transport)
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        self._waiting.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None:  # no request has begun
            self.transport.close()
