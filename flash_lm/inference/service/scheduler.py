"""The thread of the running batch: sequences join it when a slot is free, and leave it when they have ended."""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flash_lm.errors import InputError
from flash_lm.inference.running_batch import NewTokens, RunningBatch
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.service.several_hosts import BatchOnAllHosts

logger = logging.getLogger(__name__)

TOKENS_A_TURN = 4  # tokens generated before sequences join and leave again
_MOST_FAILURES = 3  # consecutive failures: more are not a coincidence
_JOINING = -1  # slot number of a sequence that has none yet
Batch = RunningBatch | BatchOnAllHosts


class BusyError(RuntimeError):
    """Too many sequences are waiting."""


class ClosedError(RuntimeError):
    """The service is shutting down."""


class FailedError(RuntimeError):
    """The device or the model failed."""

    def __init__(self):
        """Sets the message."""
        super().__init__("the model failed: see the service's log")


@dataclasses.dataclass(eq=False)
class Row:
    """A sequence to generate.

    Attributes:
        prompt: token ids.
        sampling: the sampling settings.
        seed: the random seed.
        number: index of the sample among those of the same prompt and seed.
        max_tokens: largest number of new tokens.
        deliver: called from the scheduler's thread with new tokens, or with the error that ended the sequence. The last
            call has `ended` set, whether the model or max_tokens ended it.
        count: number of new tokens so far.
        ended_by_model: whether the model ended it.
        cancelled: it is no longer needed; set by `Scheduler.cancel`.
    """

    prompt: np.ndarray
    sampling: Sampling
    seed: int
    number: int
    max_tokens: int
    deliver: Callable[[NewTokens | Exception], Any] = lambda part: None
    count: int = 0
    ended_by_model: bool = False
    cancelled: bool = False


class Scheduler:
    """Runs a batch in a separate thread until it is closed."""

    def __init__(self, batch: Batch, most_waiting: int, renew: Callable[[], Batch] | None = None):
        """Starts the thread.

        Args:
            batch: a batch that nothing else uses.
            most_waiting: number of sequences that may wait for a free slot.
            renew: makes a new batch after a failure; None: the first failure ends the scheduler.
        """
        # `_changed` guards the queue and the flags; the batch itself belongs to the thread.
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
        """Number of sequences that are being generated."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a free slot."""
        return len(self._waiting)

    def check(self, rows: Sequence[Row]) -> None:
        """Checks that these sequences may be submitted.

        Raises:
            BusyError: too many sequences are waiting.
            ClosedError: the scheduler is closed.
            FailedError: its thread has failed.
            InputError: these are more sequences than can ever wait.
        """
        if self.failed:
            raise FailedError
        if self._closing:
            raise ClosedError("the service is shutting down")
        if len(rows) > (most := self._most_waiting + self._batch.rows):
            raise InputError(f"{len(rows)} sequences are over the limit of {most} of this service: ask for fewer")
        if len(self._waiting) + len(rows) > self._most_waiting + self._batch.free:
            raise BusyError(f"{len(self._waiting)} sequences are already waiting: try again later")

    def submit(self, rows: Sequence[Row]) -> None:
        """Queues sequences, all of them or none; raises as `check` does."""
        with self._changed:
            self.check(rows)
            self._waiting.extend(rows)
            self._changed.notify()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Cancels sequences: their slots are freed at the next turn; finished ones are ignored."""
        with self._changed:
            for row in rows:
                row.cancelled = True
            self._waiting = collections.deque(row for row in self._waiting if not row.cancelled)
            self._changed.notify()

    def close(self) -> None:
        """Accepts no more sequences, finishes the current ones, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """The thread: fills free slots, generates a few tokens, and delivers them, until it is closed."""
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
        """Ends the sequences on the device, and continues with a new batch, or ends the scheduler."""
        # The arrays of the old batch are freed before a new one is made.
        self._failures, batch = self._failures + 1, None
        if self._renew is not None and self._failures <= _MOST_FAILURES:
            self._batch.release()  # two batches may not fit into memory
            try:
                batch = self._renew()
            except Exception:
                logger.exception("cannot make a new batch")

        # Waiting sequences go on if there is a new batch; all others get the error, outside of the lock.
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
        """Waits for work; returns false when the scheduler is closing and everything is done."""
        with self._changed:
            while not self._running and not self._waiting and not self._closing:
                self._changed.wait()
            return bool(self._running or self._waiting)

    def _admit(self) -> None:
        """Frees the slots of cancelled sequences, and fills free slots from the queue."""
        for slot in [slot for slot, row in self._running.items() if row.cancelled]:
            self._leave(slot)
        # First come, first served.
        while self._batch.free:
            with self._changed:
                if not self._waiting:
                    return
                row = self._waiting.popleft()
            self._running[_JOINING] = row  # so that it gets the error if this fails
            slot = self._batch.join(row.prompt, row.sampling, row.seed, row.number)
            self._running[slot] = self._running.pop(_JOINING)

    def _turn(self) -> None:
        """Generates a few tokens for all sequences, and delivers them, cut to each one's max_tokens."""
        for slot, part in self._batch.advance(TOKENS_A_TURN).items():
            # The batch may generate more tokens than a sequence has left.
            row = self._running[slot]
            left = row.max_tokens - row.count
            row.ended_by_model = part.ended and len(part.tokens) < left
            part = NewTokens(part.tokens[:left], part.log_probs[:left], row.ended_by_model or len(part.tokens) >= left)
            row.count += len(part.tokens)
            if part.ended:
                self._leave(slot)
            if not row.cancelled:
                row.deliver(part)

    def _leave(self, slot: int) -> None:
        del self._running[slot]
        self._batch.leave(slot)
