"""The hosts of a run: how they find each other, and what they tell each other."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from flash_lm.errors import InputError, RunError

HEARTBEAT_S = 30  # a host that is silent for so long is gone


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
        jax.distributed.initialize(coordinator, hosts, number, heartbeat_timeout_seconds=HEARTBEAT_S)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"no other hosts: {reason}; on no known cluster give --hosts=ADDRESS:PORT,COUNT,NUMBER"
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
            f"another host is gone ({str(error).splitlines()[0][:200]}): start all hosts again, and the run goes on "
            f"from its newest checkpoint"
        ) from error


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
