"""flash-lm launch [--processes=N] [--restarts=N] COMMAND …."""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from flash_lm.cli.run import run
from flash_lm.errors import STOPPED, InputError
from flash_lm.runs.saved_steps import saved_steps
from flash_lm.runs.storage import explain_errors, reach

# Exit codes after which the command would end in the same way, or was meant to end: success; a run that cannot
# continue; bad input; a command that cannot be run, or is not found; Ctrl-C.
_FINAL = (0, 1, 2, 126, 127, 128 + signal.SIGINT)
_FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
_GRACE_S = 60.0  # for the other processes to notice that one has failed, and to end
_LOOK_S = 0.1
_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # before a restart; it doubles with each one that brings nothing


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm launch", description=main.__doc__)
    parser.add_argument(
        "--processes", type=int, default=1, help="processes of this machine, each with one GPU; default: one with all"
    )
    parser.add_argument(
        "--restarts", type=int, default=5, help="most restarts in a row that bring no new checkpoint in its --workdir"
    )
    parser.add_argument("command", help="such as flash-lm train --config=… --workdir=…")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> None:
    """Runs a command, and starts it again when it has crashed, was killed or met what may pass (exit code 75).

    It is not started again when it has ended well, its input was bad, or its run cannot continue; nor after a signal,
    which is handed on to it.
    """
    arguments = flags().parse_args(argv)
    if arguments.processes < 1:
        raise InputError(f"--processes={arguments.processes} must be at least 1")
    command = [arguments.command, *arguments.words]
    processes, failed, newest = _Processes(command, arguments.processes), 0, _newest_checkpoint(command)
    while True:
        code = processes.run()
        if code in _FINAL or processes.signalled.is_set():
            sys.exit(code)
        # Only restarts that bring nothing are counted: a run may be interrupted as often as it gets on.
        before, newest = newest, _newest_checkpoint(command)
        failed = 1 if newest > before else failed + 1
        if failed > arguments.restarts:
            _say(f"exit code {code}, {arguments.restarts} restarts without a new checkpoint: it is not started again")
            sys.exit(code)
        pause = min(_PAUSE_S * 2 ** (failed - 1), _LONGEST_PAUSE_S)
        _say(f"exit code {code}: it starts again in {pause:.0f} s, {failed} of {arguments.restarts} times in a row")
        if processes.signalled.wait(pause):
            sys.exit(STOPPED)


class _Processes:
    """The processes of a command.

    Attributes:
        signalled: set when a signal has come.
    """

    def __init__(self, command: Sequence[str], count: int):
        """Hands signals on to the processes from now on; those that are ignored stay so, as under nohup."""
        self.signalled = threading.Event()
        self._command, self._count = command, count
        self._running: list[subprocess.Popen] = []
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._forward(number))

    def run(self) -> int:
        """Runs all processes to their end; returns 0, or the exit code of the first one that failed.

        Raises:
            InputError: the command cannot be run.
        """
        self._start()
        code, since = 0, 0.0
        while any(process.poll() is None for process in self._running):
            time.sleep(_LOOK_S)
            failed = [process.returncode for process in self._running if process.returncode]
            if failed and not code:
                code, since = min(failed), time.monotonic()  # of several, a signal (negative) or an error is the cause
            # A process may hang without the one that failed.
            if code and not self.signalled.is_set() and time.monotonic() - since > _GRACE_S:
                self._send(signal.SIGKILL)
        code = code or min((process.returncode for process in self._running if process.returncode), default=0)
        return code if code >= 0 else 128 - code

    def _start(self) -> None:
        self._running = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        for number in range(self._count):
            words, environment = list(self._command), dict(os.environ)
            if self._count > 1:
                words.append(f"--hosts={address},{self._count},{number}")
                environment["JAX_LOCAL_DEVICE_IDS"] = str(number)
            # A session of its own: Ctrl-C in the terminal would else reach it twice.
            try:
                process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
            except OSError as error:
                raise InputError(f"cannot run {words[0]}: {error.strerror}") from None
            self._running.append(process)
        if self.signalled.is_set():  # it came before they could get it
            self._send(signal.SIGTERM)

    def _forward(self, number: int) -> None:
        self.signalled.set()
        self._send(number)

    def _send(self, number: int) -> None:
        """Sends a signal to the running processes and what they have started, as a terminal does."""
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, number)


def _newest_checkpoint(command: Sequence[str]) -> int:
    """The step of the newest checkpoint in the --workdir that a command names; -1: none, or it cannot be seen here."""
    workdir = re.search(r"--workdir[= ](\S+)", " ".join(command))
    if workdir is None:
        return -1
    try:
        path = reach(workdir[1])
        with explain_errors(path):
            return max(saved_steps(path), default=-1)
    except InputError:  # an address that this machine may not read
        return -1


def _say(line: str) -> None:
    print(f"launch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main, flags)
