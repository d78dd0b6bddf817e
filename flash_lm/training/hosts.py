"""The hosts of a run: how they find each other, and what they tell each other."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from flash_lm.errors import InputError, RunError, first_line

HEARTBEAT_S = 30  # a host that is silent for so long is gone
_ASK_EVERY_S = 5.0  # whether to stop
_MOST_UNASKED = 100  # steps


def join(coordinator: str | None = None, hosts: int | None = None, number: int | None = None) -> None:
    """Makes this process one host of a run; to be called before JAX looks for devices.

    Args:
        coordinator: address:port of host 0; None: of the cluster that JAX discovers (SLURM, TPU, Kubernetes, MPI).
        hosts: number of them.
        number: of this one.

    Raises:
        InputError: nothing was discovered, or the others do not come.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            hosts,
            number,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=HEARTBEAT_S,  # at the end of one that has failed alone
        )
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"no other hosts ({first_line(error).rstrip('.')}): on SLURM, Kubernetes, MPI or a TPU pod give "
            f"--hosts=auto, anywhere else --hosts=ADDRESS:PORT,COUNT,NUMBER"
        ) from None


def parse_hosts(word: str) -> tuple[str | None, int | None, int | None]:
    """What `join` takes, of a command's word: auto, or ADDRESS:PORT,COUNT,NUMBER.

    Raises:
        InputError: something else.
    """
    if word == "auto":
        return None, None, None
    found = re.fullmatch(r"([^,\s]+:\d+),([1-9]\d*),(\d+)", word)
    if not found or int(found[3]) >= int(found[2]):
        raise InputError(f"--hosts={word} must be auto, or ADDRESS:PORT,COUNT,NUMBER with a NUMBER below COUNT")
    return found[1], int(found[2]), int(found[3])


def is_first() -> bool:
    """Whether this is the host that writes what is written once."""
    return jax.process_index() == 0


@contextlib.contextmanager
def losses_told() -> Iterator[None]:
    """The loss of another host as one clear line, in place of what the network says."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise RunError(
            f"another host is gone ({first_line(error)}): start all hosts again, and the run goes on "
            f"from its newest checkpoint"
        ) from error


def check_same(**facts: Any) -> None:
    """Checks that all hosts know the same.

    Args:
        facts: JSON values by name.

    Raises:
        InputError: they do not.
    """
    told = of_all_hosts(facts)
    if differing := [name for name in facts if any(there[name] != told[0][name] for there in told)]:
        raise InputError(
            f"the hosts differ in {', '.join(differing)}: start the same command on each, with the same Python, and "
            f"with workdir and data.cache_dir on a disk that all share"
        )


class StopOfAllHosts:
    """Several hosts must end at the same step, so they ask each other, at steps that they have agreed on."""

    def __init__(self, should_stop: Callable[[], bool]):
        """`should_stop`: of this host."""
        self._should_stop = should_stop
        self._asks_at, self._asked = 0, (0, 0.0)  # a step; the last one and its time

    def __call__(self, step: int, seconds: float) -> bool:
        """Whether to stop after a step, at so many seconds of training."""
        if jax.process_count() == 1:
            return self._should_stop()
        if step < self._asks_at:
            return False
        answers = of_all_hosts([self._should_stop(), seconds])
        slowest, (before, then) = max(there for _, there in answers), self._asked
        a_step = (slowest - then) / max(step - before, 1)
        self._asks_at = step + max(1, min(_MOST_UNASKED, int(_ASK_EVERY_S / max(a_step, 1e-3))))
        self._asked = step, slowest
        return any(stops for stops, _ in answers)


def fetched(x: jax.Array) -> np.ndarray:
    """All of an array, on every host, wherever its parts lie."""
    return np.asarray(x) if x.is_fully_addressable else np.asarray(multihost_utils.process_allgather(x, tiled=True))


def of_all_hosts(value: Any) -> list[Any]:
    """Each host's JSON value, on every host, in the order of their numbers."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(text)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(texts, sizes, strict=True)]
