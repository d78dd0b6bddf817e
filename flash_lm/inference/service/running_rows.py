"""The scheduler's sequences for the event loop: submits them, and yields their new tokens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax
import numpy as np

from flash_lm.inference.engine import Engine
from flash_lm.inference.running_batch import NewTokens, RunningBatch
from flash_lm.inference.sampling import Sampling
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.metrics import Metrics
from flash_lm.inference.service.scheduler import TOKENS_A_TURN, Row, Scheduler
from flash_lm.inference.service.several_hosts import BatchOnAllHosts

WAITING = "Rows waiting for a free place"


class RunningRows:
    """Generates sequences ("rows") for the event loop.

    Attributes:
        scheduler: the scheduler.
        calls_on_all_hosts: the calls that all hosts make; None: only one host.
        state_bytes: bytes of decode state per sequence.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics, **calls: Callable[..., Any]):
        """Allocates the decode states, and starts the scheduler; `calls` are further calls of all hosts."""
        # Everything is compiled before the first request; a batch is made anew after a failure.
        capacity = most_tokens(engine, limits)
        self.state_bytes, self._metrics = engine.state_bytes(1, capacity), metrics
        renew = lambda: RunningBatch(engine, limits.rows, capacity)
        _compile_all(batch := renew(), min(limits.prompt_tokens, engine.longest_prompt(capacity)))
        self.calls_on_all_hosts = None
        if jax.process_count() > 1:  # after a failure the hosts are out of step: no new batch
            batch = BatchOnAllHosts(batch, **calls)
            self.calls_on_all_hosts, renew = batch.calls_on_all_hosts, None
        self.scheduler = scheduler = Scheduler(batch, limits.waiting, renew)
        metrics.watch("running_rows", "Rows being generated", lambda: scheduler.running)
        metrics.watch("waiting_rows", WAITING, lambda: scheduler.waiting)

    def close(self) -> None:
        """Finishes the current sequences."""
        self.scheduler.close()
        if self.calls_on_all_hosts:
            self.calls_on_all_hosts.close()

    async def parts(self, rows: Sequence[Row]) -> AsyncIterator[tuple[int, NewTokens]]:
        """Submits sequences, and yields the new tokens of each with its index, until all have ended.

        When the caller stops iterating or is cancelled, their slots are freed. A sequence that the caller cancels
        yields nothing more.
        """
        # The scheduler's thread puts new tokens into a queue of this event loop.
        loop, queue, start = asyncio.get_running_loop(), asyncio.Queue(), time.perf_counter()
        for number, row in enumerate(rows):
            row.deliver = lambda part, number=number: loop.call_soon_threadsafe(queue.put_nowait, (number, part))

        # Yield them in the order of their arrival; an error ends all sequences of the request.
        self.scheduler.submit(rows)
        try:
            left, first = len(rows), True
            while left:
                number, part = await queue.get()
                if rows[number].cancelled:
                    continue
                if isinstance(part, Exception):
                    raise part
                if first:
                    self._metrics.first_token_seconds.observe(time.perf_counter() - start)
                first = False
                self._metrics.tokens.inc(len(part.tokens))
                yield number, part
                left -= part.ended or rows[number].cancelled
        finally:
            self.scheduler.cancel(rows)


def most_tokens(engine: Engine, limits: Limits) -> int:
    """Largest sequence length, from the limits of the service and the positions of the model."""
    asked = engine.prompt_positions(limits.prompt_tokens) + limits.new_tokens
    return min(asked, engine.limit or asked)


def _compile_all(batch: RunningBatch, longest: int) -> None:
    """Compiles everything that a request may need, so that no request waits for compilation."""
    # Each bucket of prompts, and the loop with and without filters.
    lengths = sorted({min(2**i, longest) for i in range(longest.bit_length() + 1)})
    for length, sampling in [(1, Sampling(top_p=0.5)), *((length, Sampling()) for length in lengths)]:
        row = batch.join(np.zeros(length, np.int32), sampling, seed=0)
        batch.advance(TOKENS_A_TURN)
        batch.leave(row)
