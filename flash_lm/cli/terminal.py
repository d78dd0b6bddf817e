"""Output to terminals that cannot show every character, and to readers that stop early (generate … | head)."""

import atexit
import io
import os
import select
import sys

CLOSED = 141  # the exit code of programs that write to a closed pipe, as shells report it


def prepare_output() -> None:
    """Replaces characters that cannot be shown, and makes a command end quietly when nobody reads what it prints."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    atexit.register(output_is_closed)  # else Python reports what it could not write at its end


def output_is_closed() -> bool:
    """Whether nobody reads standard output any more; what is still to be written is then dropped."""
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout.closed:
        return False
    # Poll for errors alone: a closed pipe reports one.
    asked = select.poll()
    try:
        asked.register(sys.stdout.fileno(), 0)  # errors are always reported
    except io.UnsupportedOperation:  # no file, as in a notebook
        return False
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed
