"""Batches requests that arrive while the device is busy."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.scheduler import BusyError, FailedError

logger = logging.getLogger(__name__)
Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclasses.dataclass
class _Waiting(Generic[Request, Result]):
    request: Request
    result: "asyncio.Future[Result | None]"
    due: float  # seconds of time.perf_counter


class RequestBatcher(Generic[Request, Result]):
    """Collects requests into batches, and answers one batch at a time."""

    def __init__(
        self,
        answer: Callable[[list[Request]], list[Result]],
        limits: Limits,
        delay: Callable[[Request], float] = lambda request: 0.0,
        fit: Callable[[Sequence[Request]], bool] = lambda batch: True,
    ):
        """Starts nothing.

        Args:
            answer: function (batch) -> results in the same order; called in a thread, one batch at a time.
            limits: largest numbers of requests per batch and in the queue.
            delay: seconds by which others may overtake a request.
            fit: whether a batch is small enough; a single request always is.
        """
        self._answer, self._limits, self._delay, self._fit = answer, limits, delay, fit
        self._waiting: list[_Waiting[Request, Result]] = []
        self._answering: asyncio.Task[None] | None = None

    async def __call__(self, request: Request) -> Result:
        """Queues a request, and returns its result.

        Raises:
            BusyError: too many requests are waiting.
            FailedError: the device failed.
        """
        if self.waiting >= self._limits.waiting:
            raise BusyError(f"{self.waiting} requests are already waiting: try again later")
        start, future = time.perf_counter(), asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, future, due=start + self._delay(request)))
        # One task works off the queue; it ends when the queue is empty.
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_all())
        if (result := await future) is None:
            raise FailedError
        return result

    @property
    def waiting(self) -> int:
        """Number of waiting requests, without those whose clients have left."""
        return sum(not one.result.done() for one in self._waiting)

    async def _answer_all(self) -> None:
        """Answers batches until the queue is empty."""
        # The device works in a thread, so that the event loop can take requests meanwhile.
        while batch := self._next():
            try:
                result: list[Result | None] = [*await asyncio.to_thread(self._answer, [one.request for one in batch])]
            except Exception:  # any device error: no client may wait forever
                logger.exception("a batch of requests failed")
                result = [None] * len(batch)
            for waiting, one in zip(batch, result, strict=True):
                if not waiting.result.done():
                    waiting.result.set_result(one)

    def _next(self) -> list[_Waiting[Request, Result]]:
        """Takes the requests that are due first from the queue, as many as fit into one batch."""
        batch: list[_Waiting[Request, Result]] = []
        self._waiting = sorted((one for one in self._waiting if not one.result.done()), key=lambda one: one.due)
        for one in self._waiting[: self._limits.rows]:
            if batch and not self._fit([x.request for x in [*batch, one]]):
                break
            batch.append(one)
        self._waiting = self._waiting[len(batch) :]
        return batch
