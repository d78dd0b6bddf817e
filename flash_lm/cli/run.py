"""Runs a command: one clear line per error, and an exit code that says what kind it was."""

import argparse
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from flash_lm.cli.huge_pages import use_huge_pages
from flash_lm.cli.terminal import CLOSED, output_is_closed, prepare_output
from flash_lm.cli.words import check_flags, spell
from flash_lm.errors import CRASHED, DISK_FULL, STOPPED, InputError, RunError, Stopped

_log = logging.getLogger(__name__)
_SHOWN = 200  # characters of a file's name
# Error of the system -> the problem of a file or folder that a command could not write or read.
_FILE_ERRORS = {
    errno.EACCES: "permission denied for {}: choose another folder",
    errno.EPERM: "permission denied for {}: choose another folder",
    errno.EROFS: "{} is on a disk that cannot be written: choose another folder",
    errno.EEXIST: "{} is a file: choose another folder",
    errno.ENOTDIR: "{} is a file: choose another folder",
    errno.EISDIR: "{} is a folder, where a file should be: remove it, or choose another place",
    errno.ENOENT: "{} does not exist and cannot be made: choose another place",
    errno.ENAMETOOLONG: "{}: File name too long: choose another name",
    errno.ELOOP: "{}: Too many levels of symbolic links: choose another name",
    errno.EIO: "{}: Input/output error: check the disk",
}


def run(main: Callable[[list[str]], None], flags: Callable[[], argparse.ArgumentParser] | None = None) -> None:
    """Runs a command. Bad input exits with code 2, a RunError with 1; each problem is printed on its own line.

    Stopped by a signal before its end, or by a PassingError, it exits with 75; an unexpected error exits with 70.

    Args:
        main: takes the words of the command line.
        flags: makes the parser of `main`, so that --help and wrong flags end the process before it restarts.
    """
    if not {"", os.getcwd()} & {*sys.path} and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as with python -m, so that scripts find the same plugins
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)  # absl has set it up
    logging.getLogger("flash_lm").setLevel(logging.INFO)
    # Orbax logs the folders that it opens, and the tracebacks of failed writes, which reach us as exceptions as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.unraisablehook = _report_unraisable
    prepare_output()
    # Each kind of error has its exit code; unexpected ones keep their traceback.
    try:
        if flags:
            parser = flags()
            sys.argv[1:] = spell(parser, sys.argv[1:])
            check_flags(parser, sys.argv[1:])
            parser.parse_known_args(sys.argv[1:])
        use_huge_pages()
        main(sys.argv[1:])
        print(end="", flush=True)  # inside the try, so that a full disk is reported
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO) and output_is_closed():
            sys.exit(CLOSED)
        if error.errno not in DISK_FULL and (error.errno not in _FILE_ERRORS or error.filename is None):
            _crash()
        name = str(error.filename or "a file")[:_SHOWN]
        line = _FILE_ERRORS.get(error.errno or 0, f"{{}}: {error.strerror}: free space")
        print(f"error: {line.format(name)}", file=sys.stderr)
        sys.exit(1 if error.errno in DISK_FULL else 2)
    except (InputError, RunError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Stopped as stopped:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(*stopped.args, sep="\n", end="\n" if stopped.args else "", flush=True)
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception:
        _crash()


def _crash() -> NoReturn:
    """Reports the error as Python does; its exit code would be 1, after which a launcher does not try again."""
    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    sys.exit(CRASHED)


def _report_unraisable(unraisable: Any) -> None:
    """Reports as Python does, except for writes of a checkpoint that end after another one has failed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
