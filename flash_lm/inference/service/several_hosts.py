"""A service of a model on several hosts: the first host answers, and all hosts compute."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from flash_lm.inference.running_batch import NewTokens, RunningBatch
from flash_lm.inference.sampling import Sampling
from flash_lm.runs.hosts import gather_from_hosts

_ASK_EVERY_S = 1.0  # a call at least this often: the network does not let hosts wait long for each other
_NOTHING, _END = "nothing", "end"


class CallsOnAllHosts:
    """Calls that every host makes when the first host does."""

    def __init__(self, **calls: Callable[..., Any]):
        """Takes functions of JSON values, by name."""
        self._calls, self._is_distributed = calls, jax.process_count() > 1
        self._one_at_a_time, self._ended = threading.Lock(), threading.Event()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Makes a call on all hosts; only the first host may call this."""
        # The name and the arguments reach the other hosts, which wait in `follow`; calls must not interleave.
        if not self._is_distributed:
            return self._calls[name](*arguments)
        with self._one_at_a_time:
            gather_from_hosts([name, arguments])
            return self._calls[name](*arguments)

    def lead(self) -> None:
        """Starts the thread that calls the other hosts now and then; for the first host.

        From now on only calls of this object may start programs: any other would interleave with the thread's.
        """
        if self._is_distributed:
            threading.Thread(target=self._ask, name="hosts", daemon=True).start()

    def follow(self) -> None:
        """Makes the calls of the first host until it ends; for the other hosts."""
        while True:
            name, arguments = gather_from_hosts(None)[0]
            if name == _END:
                return
            if name != _NOTHING:
                self._calls[name](*arguments)

    def close(self) -> None:
        """Ends `follow` on the other hosts; for the first host."""
        if self._is_distributed:
            with self._one_at_a_time:
                self._ended.set()
                gather_from_hosts([_END, []])

    def _ask(self) -> None:
        """Makes empty calls, so that the other hosts never wait too long."""
        while not self._ended.wait(_ASK_EVERY_S):
            with self._one_at_a_time:
                if not self._ended.is_set():
                    gather_from_hosts([_NOTHING, []])


class BatchOnAllHosts:
    """A running batch on all hosts, with the interface of a RunningBatch."""

    def __init__(self, batch: RunningBatch, **calls: Callable[..., Any]):
        """Takes this host's part; `calls` are further calls of all hosts."""
        self._batch = batch
        batch_calls = {"join": self._join, "advance": batch.advance, "leave": batch.leave}
        self.calls_on_all_hosts = CallsOnAllHosts(**batch_calls, **calls)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self._batch.free

    @property
    def rows(self) -> int:
        """Number of all slots."""
        return self._batch.rows

    def join(self, prompt: np.ndarray, sampling: Sampling, seed: int, number: int = 0) -> int:
        """Prefills a prompt in a free slot, see `RunningBatch.join`."""
        return self.calls_on_all_hosts("join", prompt.tolist(), dataclasses.asdict(sampling), seed, number)

    def advance(self, tokens: int) -> dict[int, NewTokens]:
        """Generates tokens for all sequences, see `RunningBatch.advance`."""
        return self.calls_on_all_hosts("advance", tokens)

    def leave(self, row: int) -> None:
        """Frees a slot."""
        self.calls_on_all_hosts("leave", row)

    def release(self) -> None:
        """Releases the arrays of this host's part."""
        self._batch.release()

    def _join(self, prompt: list[int], sampling: dict[str, Any], seed: int, number: int) -> int:
        return self._batch.join(np.array(prompt, np.int32), Sampling(**sampling), seed, number)
