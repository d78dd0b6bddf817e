"""The thread of the running batch: rows of requests join the running batch when they arrive, and leave when done."""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flash_lm.errors import InputError
from flash_lm.inference.running_batch import Part, RunningBatch
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.service.several_hosts import BatchOnAllHosts

logger = logging.getLogger(__name__)

TOKENS_A_TURN = 4  # tokens generated before rows join and leave again
_MOST_FAILURES = 3  # consecutive failures: more are not a coincidence
_JOINING = -1  # stands for the place of a row that has none yet
Batch = RunningBatch | BatchOnAllHosts


class BusyError(RuntimeError):
    """Too many rows are waiting."""


class ClosedError(RuntimeError):
    """The service is shutting down."""


class FailedError(RuntimeError):
    """The device or the model failed."""

    def __init__(self):
        """Sets the message, which is the same for all."""
        super().__init__("the model failed: see the service's log")


@dataclasses.dataclass(eq=False)
class Row:
    """One row to generate.

    Attributes:
        prompt: token ids.
        sampling: the row's sampling settings.
        seed: the random seed.
        number: number of the sample among those of the same prompt and seed.
        max_tokens: the row ends after this many tokens, if the model does not end it before.
        deliver: called from the scheduler's thread with each part, or with the error that ended the row. The last part
            has `ended` set, whether the model or max_tokens ended the row.
        count: tokens so far.
        by_model: whether the model ended it.
        cancelled: the row is no longer needed; set by `Scheduler.cancel`.
    """

    prompt: np.ndarray
    sampling: Sampling
    seed: int
    number: int
    max_tokens: int
    deliver: Callable[[Part | Exception], Any] = lambda part: None
    count: int = 0
    by_model: bool = False
    cancelled: bool = False


class Scheduler:
    """Runs a batch in a thread of its own until it is closed."""

    def __init__(self, batch: Batch, most_waiting: int, renew: Callable[[], Batch] | None = None):
        """Starts the thread.

        Args:
            batch: a batch that nothing else uses.
            most_waiting: rows that may wait for a free place.
            renew: makes a new batch after a failure; None: the first failure ends the scheduler.
        """
        self._batch, self._most_waiting, self._renew = batch, most_waiting, renew
        self._failures = 0  # in a row
        self._waiting: collections.deque[Row] = collections.deque()
        self._running: dict[int, Row] = {}
        self._changed = threading.Condition()
        self._closing, self.failed = False, False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Rows that are being generated."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Rows that wait for a free place."""
        return len(self._waiting)

    def check(self, rows: Sequence[Row]) -> None:
        """Checks that these rows may be submitted.

        Raises:
            BusyError: too many rows are waiting.
            ClosedError: the scheduler is closed.
            FailedError: its thread has failed.
            InputError: there are more rows than can ever wait.
        """
        if self.failed:
            raise FailedError
        if self._closing:
            raise ClosedError("the service is shutting down")
        if len(rows) > (most := self._most_waiting + self._batch.rows):
            raise InputError(f"{len(rows)} rows are over the limit of {most} of this service: ask for fewer")
        if len(self._waiting) + len(rows) > self._most_waiting + self._batch.free:
            raise BusyError(f"{len(self._waiting)} rows are already waiting: try again later")

    def submit(self, rows: Sequence[Row]) -> None:
        """Queues rows, all of them or none; raises as `check` does."""
        with self._changed:
            self.check(rows)
            self._waiting.extend(rows)
            self._changed.notify()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Frees the places of rows at the next turn; finished rows are ignored."""
        with self._changed:
            for row in rows:
                row.cancelled = True
            self._waiting = collections.deque(row for row in self._waiting if not row.cancelled)
            self._changed.notify()

    def close(self) -> None:
        """Accepts no more rows, finishes the present ones, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            try:
                self._admit()
                if self._running:
                    self._turn()
                self._failures = 0
                continue
            except Exception:  # any device error: no client may wait forever
                logger.exception("a step of the scheduler failed")
            self._fail()  # outside of `except`: the error refers to arrays of the batch
            if self.failed:
                return

    def _fail(self) -> None:
        """Ends the rows that were on the device, and continues with a new batch, or ends the scheduler."""
        self._failures, batch = self._failures + 1, None
        if self._renew is not None and self._failures <= _MOST_FAILURES:
            self._batch.release()  # two batches may not fit into memory
            try:
                batch = self._renew()
            except Exception:
                logger.exception("cannot make a new batch")
        with self._changed:
            left = [*self._running.values()]
            self._running.clear()
            if batch is None:
                self.failed = True
                left += self._waiting
                self._waiting.clear()
            else:
                self._batch = batch
        for row in left:
            row.deliver(FailedError())

    def _wait(self) -> bool:
        """Waits until there is something to do; returns false when everything is done and it is closing."""
        with self._changed:
            while not self._running and not self._waiting and not self._closing:
                self._changed.wait()
            return bool(self._running or self._waiting)

    def _admit(self) -> None:
        """Puts the next rows into the free places."""
        for place in [place for place, row in self._running.items() if row.cancelled]:
            self._leave(place)
        while self._batch.free:
            with self._changed:
                if not self._waiting:
                    return
                row = self._waiting.popleft()
            self._running[_JOINING] = row  # so that it gets the error if this fails
            place = self._batch.join(row.prompt, row.sampling, row.seed, row.number)
            self._running[place] = self._running.pop(_JOINING)

    def _turn(self) -> None:
        for place, part in self._batch.advance(TOKENS_A_TURN).items():
            row = self._running[place]
            left = row.max_tokens - row.count
            row.by_model = part.ended and len(part.tokens) < left
            part = Part(part.tokens[:left], part.log_probs[:left], row.by_model or len(part.tokens) >= left)
            row.count += len(part.tokens)
            if part.ended:
                self._leave(place)
            if not row.cancelled:
                row.deliver(part)

    def _leave(self, place: int) -> None:
        del self._running[place]
        self._batch.leave(place)
