"""Notices of Google Cloud that it will stop this machine, read from the machine's metadata server.

A Spot machine has up to 30 seconds from `preempted` until it is shut down, and processes get a TERM only then:
https://cloud.google.com/compute/docs/instances/create-use-preemptible. Maintenance that stops a machine, as it does
those with GPUs and TPUs, is announced a minute to an hour before:
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from flash_lm.runs import google_metadata


class _Notice(NamedTuple):
    value: str
    reason: str
    counts_at_start: bool  # maintenance may be an hour away: a run that starts again meanwhile must not end at once


# Key of the metadata server -> the value that says that the machine will be stopped.
_NOTICES = {
    "preempted": _Notice("TRUE", "preempts this machine", counts_at_start=True),
    "maintenance-event": _Notice(
        "TERMINATE_ON_HOST_MAINTENANCE", "will stop this machine for maintenance", counts_at_start=False
    ),
}
_PAUSE_S = 1.0  # between questions


def watch_for_preemption(notify: Callable[[str], None]) -> None:
    """Begins to watch for notices, in threads that end on machines elsewhere, where no such server answers.

    Args:
        notify: receives the reason, in a thread.
    """
    for key in _NOTICES:
        threading.Thread(target=_watch, args=(key, notify), daemon=True).start()


def _watch(key: str, notify: Callable[[str], None]) -> None:
    """Asks for the value, then again and again for its next change."""
    notice, tag = _NOTICES[key], None
    while True:
        is_start = tag is None
        try:
            value, tag = google_metadata.ask(key, tag)
        except google_metadata.ERRORS as error:
            # Not on Google Cloud, where the server may be late at boot.
            if is_start and (isinstance(error, FileNotFoundError) or not google_metadata.is_googles_machine()):
                return
        else:
            if value == notice.value and (notice.counts_at_start or not is_start):
                return notify(f"Google Cloud {notice.reason}")
        time.sleep(_PAUSE_S)
