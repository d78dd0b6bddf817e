"""Several hosts as threads of one process: what they exchange goes through a barrier instead of a network."""

import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from flash_lm.data import shared_tokenising, token_cache
from flash_lm.runs import hosts as hosts_module


def run_on_hosts(monkeypatch, count: int, action: Callable[[int], Any]) -> list[Any]:
    """What `action` of a host's number returns on each host, or the error that it raises there."""
    here, barrier, slots = threading.local(), threading.Barrier(count, timeout=20), [None] * count

    def allgather(x):
        slots[here.number] = x
        barrier.wait()
        result = np.stack(slots)
        barrier.wait()
        return result

    jax = types.SimpleNamespace(
        process_count=lambda: count,
        process_index=lambda: here.number,
        distributed=types.SimpleNamespace(is_initialized=lambda: True),
    )
    for module in (hosts_module, shared_tokenising, token_cache):
        monkeypatch.setattr(module, "jax", jax)
    exchange = types.SimpleNamespace(process_allgather=allgather)
    monkeypatch.setattr(hosts_module, "multihost_utils", exchange)

    def run(number: int) -> Any:
        here.number = number
        try:
            return action(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
