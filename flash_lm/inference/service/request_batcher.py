"""Requests that arrive while the device is busy, and are answered together next."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.scheduler import BusyError, FailedError

logger = logging.getLogger(__name__)
Asked = TypeVar("Asked")
Found = TypeVar("Found")


@dataclasses.dataclass
class _Waiting(Generic[Asked, Found]):
    asked: Asked
    found: "asyncio.Future[Found | None]"
    due: float  # seconds of time.perf_counter


class Together(Generic[Asked, Found]):
    """Answers requests a batch at a time."""

    def __init__(
        self,
        answer: Callable[[list[Asked]], list[Found]],
        limits: Limits,
        delay: Callable[[Asked], float] = lambda asked: 0.0,
        fit: Callable[[Sequence[Asked]], bool] = lambda batch: True,
    ):
        """Starts nothing.

        Args:
            answer: answers a batch, in its order; called in a thread, one batch at a time.
            limits: how many requests a batch may have, and how many may wait.
            delay: seconds by which others may overtake a request.
            fit: whether a batch is small enough; one request always is.
        """
        self._answer, self._limits, self._delay, self._fit = answer, limits, delay, fit
        self._waiting: list[_Waiting[Asked, Found]] = []
        self._answering: asyncio.Task[None] | None = None

    async def __call__(self, asked: Asked) -> Found:
        """The answer to a request.

        Raises:
            BusyError: too many requests are waiting.
            FailedError: the device failed.
        """
        if self.waiting >= self._limits.waiting:
            raise BusyError(f"{self.waiting} requests are already waiting: try again later")
        start, future = time.perf_counter(), asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(asked, future, due=start + self._delay(asked)))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_all())
        if (found := await future) is None:
            raise FailedError
        return found

    @property
    def waiting(self) -> int:
        """The number of waiting clients, without those that have left."""
        return sum(not one.found.done() for one in self._waiting)

    async def _answer_all(self) -> None:
        while batch := self._next():
            try:
                found: list[Found | None] = [*await asyncio.to_thread(self._answer, [one.asked for one in batch])]
            except Exception:  # any device error: no client may wait forever
                logger.exception("a batch of requests failed")
                found = [None] * len(batch)
            for waiting, one in zip(batch, found, strict=True):
                if not waiting.found.done():
                    waiting.found.set_result(one)

    def _next(self) -> list[_Waiting[Asked, Found]]:
        """The requests due first, as many as fit into one batch."""
        batch: list[_Waiting[Asked, Found]] = []
        self._waiting = sorted((one for one in self._waiting if not one.found.done()), key=lambda one: one.due)
        for one in self._waiting[: self._limits.rows]:
            if batch and not self._fit([x.asked for x in [*batch, one]]):
                break
            batch.append(one)
        self._waiting = self._waiting[len(batch) :]
        return batch
