"""The thread that owns the device: rows of requests join the running batch as they come, and leave it when done."""

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

TOKENS_A_TURN = 4  # between two looks at who comes and goes
_MOST_FAILURES = 3  # in a row: more are no accident
_JOINING = -1  # the place of a row that has none yet
Batch = RunningBatch | BatchOnAllHosts


class BusyError(RuntimeError):
    """There are too many rows waiting."""


class ClosedError(RuntimeError):
    """The service is ending."""


class FailedError(RuntimeError):
    """The device or the model did."""

    def __init__(self):
        """With the same sentence for all."""
        super().__init__("the model failed: the log of the service tells why")


@dataclasses.dataclass(eq=False)
class Row:
    """One row that is to be generated.

    Attributes:
        prompt: ids.
        sampling: of the row.
        seed: of the draws.
        number: of the sample of the same prompt and seed.
        max_tokens: at which it ends, if the model does not end it before.
        deliver: called from the scheduler's thread with each part, or with the error that ended it. The last part says
            `ended`, whether the model or max_tokens did it.
        count: tokens so far.
        by_model: whether the model ended it.
        cancelled: nobody wants it any longer; set by `Scheduler.cancel`.
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
            batch: that nobody else uses.
            most_waiting: rows that may wait for a free one.
            renew: makes another batch in the place of one that has failed; None: the first failure is the last.
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
        """Rows that wait for a free one."""
        return len(self._waiting)

    def check(self, rows: Sequence[Row]) -> None:
        """Whether these rows may wait for their turn.

        Raises:
            BusyError: too many wait.
            ClosedError: the scheduler is closed.
            FailedError: its thread has failed.
            InputError: so many rows can never wait.
        """
        if self.failed:
            raise FailedError
        if self._closing:
            raise ClosedError("the service is ending")
        if len(rows) > (most := self._most_waiting + self._batch.rows):
            raise InputError(f"{len(rows)} rows are over the {most} that this service takes: ask for fewer")
        if len(self._waiting) + len(rows) > self._most_waiting + self._batch.free:
            raise BusyError(f"{len(self._waiting)} rows are waiting already: try again later")

    def submit(self, rows: Sequence[Row]) -> None:
        """Lets rows wait for their turn, all of them or none; raises as `check` does."""
        with self._changed:
            self.check(rows)
            self._waiting.extend(rows)
            self._changed.notify()

    def cancel(self, rows: Sequence[Row]) -> None:
        """Frees the places of rows at the next turn; those that are done are left alone."""
        with self._changed:
            for row in rows:
                row.cancelled = True
            self._waiting = collections.deque(row for row in self._waiting if not row.cancelled)
            self._changed.notify()

    def close(self) -> None:
        """Takes no more rows, finishes those that are here, and ends the thread."""
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
            except Exception:  # whatever the device has: nobody may wait for ever
                logger.exception("a step of the scheduler failed")
            self._fail()  # after the error, which knows arrays of the batch
            if self.failed:
                return

    def _fail(self) -> None:
        """Ends the rows that were on the device, and goes on with a batch of its own making; or ends for good."""
        self._failures, batch = self._failures + 1, None
        if self._renew is not None and self._failures <= _MOST_FAILURES:
            self._batch.release()  # two may not fit
            try:
                batch = self._renew()
            except Exception:
                logger.exception("no other batch can be made")
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
        """Until there is something to do; false when all is done and no more will come."""
        with self._changed:
            while not self._running and not self._waiting and not self._closing:
                self._changed.wait()
            return bool(self._running or self._waiting)

    def _admit(self) -> None:
        """The next rows into the free places."""
        for place in [place for place, row in self._running.items() if row.cancelled]:
            self._leave(place)
        while self._batch.free:
            with self._changed:
                if not self._waiting:
                    return
                row = self._waiting.popleft()
            self._running[_JOINING] = row  # so that it is told if this fails
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
