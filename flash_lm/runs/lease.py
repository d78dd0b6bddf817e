"""The lease of a run in an object store, where no system releases a lock when a process ends.

A lease is a chain of numbered objects, of which each names the holder and the time until which it holds; the one with
the highest number counts. To take or renew a lease is to create the next number, which succeeds only if nobody else has
created it, and to see that it counts. So two processes never both believe that they hold the run. All that is asked of
the store are strongly consistent listings, and the condition that an object does not exist
(https://cloud.google.com/storage/docs/request-preconditions).
"""

import contextlib
import json
import logging
import os
import pathlib
import platform
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from flash_lm.errors import PassingError, RunError
from flash_lm.runs.storage import explain_errors, object_store

_log = logging.getLogger(__name__)
LEASE_S = 60.0  # a holder that is silent for longer has lost its lease; clocks must agree to a part of this
RENEW_S = 15.0  # between two renewals
_LOOK_S = 2.0  # how often a waiting process looks whether the lease is renewed


class Lease:
    """The right to write into a run's folder, while it is renewed."""

    def __init__(
        self,
        folder: pathlib.Path,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
    ):
        """Takes nothing yet.

        Args:
            folder: the remote folder of the lease's objects.
            now: the time in seconds, which all machines share.
            sleep: waits for a number of seconds.
        """
        self._folder, self._now, self._sleep = str(folder), now, sleep
        self._me = {"holder": f"process {os.getpid()} on {platform.node()}", "token": secrets.token_hex(8)}
        self._number, self._expires = 0, 0.0
        self._lost_to: str | None = None
        self._ends, self._renewing = threading.Event(), threading.Lock()

    def take(self) -> str | None:
        """Takes the lease; if somebody renews it, returns who.

        A lease that is not renewed, since its holder was killed, is taken when it expires.

        Raises:
            InputError: the store cannot be reached, or there is no right to write.
        """
        with explain_errors(self._folder):
            first = None
            while True:
                number, held = self._newest()
                if held and held["expires"] > self._now():
                    if first is None:
                        first = number
                        left = held["expires"] - self._now()
                        _log.info(
                            "%s had the lease of %s: waiting until it is renewed, or ends in %.0f s",
                            *(held["holder"], self._folder, left),
                        )
                    elif number != first:
                        return held["holder"]
                    self._sleep(min(_LOOK_S, LEASE_S / 10))
                elif self._create(number + 1):
                    return None

    def renew(self) -> None:
        """Renews the lease, or learns that it is lost."""
        with self._renewing:
            if self._ends.is_set():
                return
            # Later, another process may have taken the lease and released it: our next number is free, but not ours.
            until = self._expires
            if self._now() < until and self._create(self._number + 1) and self._now() < until:
                return
            self._expires = 0.0
            held = self._newest()[1]
            if held.get("token") != self._me["token"]:
                self._lost_to = held.get("holder", "another process")

    def keep(self) -> None:
        """Renews the lease until `release`; for a thread."""
        while not self._ends.wait(RENEW_S) and self._lost_to is None:
            try:
                self.renew()
            except Exception as error:  # of the network, say: the next renewal may be in time
                _log.warning("the lease %s is not renewed yet: %s", self._folder, error)

    def check(self) -> None:
        """Checks that the run is still ours to write.

        Raises:
            RunError: another process has taken it, or may have.
        """
        if self._lost_to is None and self._now() < self._expires:
            return
        how = f"{self._lost_to} has taken over" if self._lost_to else "the lease was not renewed in time"
        kind = RunError if self._lost_to else PassingError
        raise kind(f"{self._folder}: {how}; this process ends, and writes no more into the run's folder")

    def release(self) -> None:
        """Ends the lease, if it is still ours."""
        self._ends.set()
        with self._renewing, contextlib.suppress(Exception):  # it then expires
            if self._now() < self._expires:
                self._remove(self._number)

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:08}"

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """Number and content of the object that counts; 0 and nothing: there is none."""
        store = object_store()
        while True:
            try:
                names = store.ls(self._folder, detail=False)
            except FileNotFoundError:
                return 0, {}
            numbers = [int(name) for path in names if (name := path.rpartition("/")[2]).isdecimal()]
            if not numbers:
                return 0, {}
            # The holder removes an object when it has renewed it.
            with contextlib.suppress(FileNotFoundError):
                return max(numbers), json.loads(store.cat_file(self._name(max(numbers))))

    def _create(self, number: int) -> bool:
        """Creates the object of this number, and removes the one before; returns whether the lease is ours."""
        expires = self._now() + LEASE_S
        content = json.dumps(self._me | {"expires": expires}).encode()
        with contextlib.suppress(FileExistsError):  # it may be ours: the client tries again when an answer is lost
            object_store().pipe_file(self._name(number), content, mode="create")
        newest, held = self._newest()
        if newest == number and held["token"] == self._me["token"]:
            self._number, self._expires = number, min(expires, held["expires"])
            self._remove(number - 1)
            return True
        # A number that a quicker process has used and removed is free, but does not count.
        if newest > number:
            self._remove(number)
        return False

    def _remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            object_store().rm_file(self._name(number))
