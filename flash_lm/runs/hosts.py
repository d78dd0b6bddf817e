"""Multi-host runs: joining the hosts, and collective operations on small values."""

import io
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from flash_lm.errors import InputError, PassingError, RunError, first_line
from flash_lm.runs.clusters import local_device_ids
from flash_lm.runs.lost_hosts import HEARTBEAT_S, host_name, name_hosts, report_lost_host, report_lost_hosts

Result = TypeVar("Result")
_ASK_EVERY_S = 5.0  # how often the hosts ask each other whether to stop
_MOST_UNASKED = 100  # most steps between two such questions
_KINDS = {"input": InputError, "passing": PassingError, "run": RunError}  # an error has the first that it is


def join(coordinator: str | None = None, hosts: int | None = None, number: int | None = None) -> None:
    """Makes this process one host of a run; call it before JAX looks for devices.

    Args:
        coordinator: address:port of host 0; None: from the cluster that JAX finds (SLURM, TPU, Kubernetes, MPI).
        hosts: number of hosts.
        number: index of this host.

    Raises:
        InputError: no cluster was detected.
    """
    _keep_output_ours()
    report_lost_hosts()
    # A cluster that JAX knows needs no arguments; without one, it raises.
    try:
        jax.distributed.initialize(
            coordinator,
            hosts,
            number,
            local_device_ids=local_device_ids(),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=HEARTBEAT_S,  # wait at the end of a host that has failed alone
        )
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"cannot find the other hosts ({first_line(error).rstrip('.')}): give --hosts=ADDRESS:PORT,COUNT,NUMBER, "
            f"or --hosts=alone for a single process"
        ) from None
    with report_lost_host():
        name_hosts(gather_from_hosts(platform.node()))


def _keep_output_ours() -> None:
    """Sends to standard error what libraries write to file 1 (as Gloo does on CPUs), so that output can be piped."""
    ours = sys.stdout
    if ours is not sys.__stdout__ or not isinstance(ours, io.TextIOWrapper):  # it goes elsewhere, as in a notebook
        return
    # Keep our output on a copy of file 1, and let file 1 lead to standard error.
    ours.flush()
    buffering = 1 if ours.line_buffering or ours.write_through else -1
    sys.stdout = os.fdopen(os.dup(1), "w", buffering, encoding=ours.encoding, errors=ours.errors)
    os.dup2(2, 1)


def parse_hosts(word: str) -> tuple[str | None, int | None, int | None]:
    """Parses the --hosts flag, auto or ADDRESS:PORT,COUNT,NUMBER, into the arguments of `join`.

    Raises:
        InputError: it is something else.
    """
    if word == "auto":
        return None, None, None
    match = re.fullmatch(r"([^,\s]+:\d+),([1-9]\d*),(\d+)", word)
    if not match or int(match[3]) >= int(match[2]):
        raise InputError(f"--hosts={word} must be auto, alone, or ADDRESS:PORT,COUNT,NUMBER with a NUMBER below COUNT")
    return match[1], int(match[2]), int(match[3])


def is_first() -> bool:
    """Whether this host writes the files that are written once."""
    return jax.process_index() == 0


def several() -> bool:
    """Whether this process has joined others; asks JAX for no device."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


class Problem(NamedTuple):
    """What went wrong on a host, as JSON: the error's message, and its kind, a name in `_KINDS`."""

    message: str
    kind: str

    @classmethod
    def of(cls, error: Exception) -> "Problem":
        """The problem that an error is; an unexpected one may pass, but not a full disk or a file's permissions."""
        for name, kind in _KINDS.items():
            if isinstance(error, kind):
                return cls(str(error), name)
        final = isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError)
        return cls(first_line(error), "run" if final else "passing")


def check_problems(problems: Sequence[Sequence[Any] | None]) -> None:
    """Raises the problem of the first host that has one.

    Args:
        problems: of all hosts, gathered; None: it has none.

    Raises:
        InputError, RunError: with the name of the host.
    """
    for number, problem in enumerate(problems):
        if problem is not None:
            message, kind = problem
            raise _KINDS[kind](f"{host_name(number)}: {message}")


def on_all_hosts(action: Callable[[], Result]) -> Result:
    """Runs an action on every host, and waits for all.

    Raises:
        InputError, RunError: the action has failed on another host; its own error is raised as it is.
    """
    if not several():
        return action()
    try:
        result = action()
    except Exception as error:
        gather_from_hosts(Problem.of(error))
        raise
    check_problems(gather_from_hosts(None))
    return result


def check_same(**facts: Any) -> None:
    """Checks that all hosts have the same values.

    Args:
        facts: JSON values by name.

    Raises:
        InputError: they differ.
    """
    # Each fact is compared with that of the first host.
    all_facts = gather_from_hosts(facts)
    if differing := [
        name for name in facts if any(facts_of_host[name] != all_facts[0][name] for facts_of_host in all_facts)
    ]:
        raise InputError(
            f"the hosts differ in {', '.join(differing)}: start the same command on each, with the same files and the "
            f"same Python, and with workdir and data.cache_dir on a disk that all share, or in a bucket"
        )


class StopOfAllHosts:
    """Makes all hosts stop at the same step: they ask each other, at steps that they have agreed on."""

    def __init__(self, should_stop: Callable[[], bool]):
        """`should_stop`: whether this host wants to stop."""
        self._should_stop = should_stop
        self._asks_at, self._asked = 0, (0, 0.0)  # the next step to ask at; the last one and its time

    def __call__(self, step: int, seconds: float) -> bool:
        """Whether to stop after a step, at this number of seconds of training."""
        if jax.process_count() == 1:
            return self._should_stop()
        if step < self._asks_at:
            return False
        # Ask, and agree on the next step to ask at, from the slowest host's time per step.
        answers = gather_from_hosts([self._should_stop(), seconds])
        slowest, (before, then) = max(time for _, time in answers), self._asked
        a_step = (slowest - then) / max(step - before, 1)
        self._asks_at = step + max(1, min(_MOST_UNASKED, int(_ASK_EVERY_S / max(a_step, 1e-3))))
        self._asked = step, slowest
        return any(stops for stops, _ in answers)


def fetch_array(x: jax.Array) -> np.ndarray:
    """Gathers an array, however it is sharded, as a NumPy array on every host."""
    return np.asarray(x) if x.is_fully_addressable else np.asarray(multihost_utils.process_allgather(x, tiled=True))


def gather_from_hosts(value: Any) -> list[Any]:
    """Gathers a JSON value from all hosts, on every host, ordered by host number."""
    if jax.process_count() == 1:
        return [value]
    # All hosts must gather arrays of one shape: first the lengths, then padded texts.
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(text)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(texts, sizes, strict=True)]
