"""Errors that end a command with a clear line instead of a traceback."""

import difflib
import errno
from collections.abc import Iterable

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of the system that free space mends
# Exit codes of `Stopped` and `PassingError`, and of an unexpected error; as in sysexits.h.
STOPPED, CRASHED = 75, 70


class InputError(ValueError):
    """Bad input: what was wrong, what was expected, what to change; one line per problem."""

    exit_code = 2

    @classmethod
    def of(cls, problems: Iterable[str]) -> "InputError":
        """One error for several problems, each on one line, whatever input the problem repeats."""
        return cls("\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in problems))


class TooLongError(InputError):
    """A text that has more tokens than there is room for."""


class RunError(RuntimeError):
    """A run that cannot continue although its input was good."""

    exit_code = 1


class PassingError(RunError):
    """A failure that may have passed when the same command is run again."""

    exit_code = STOPPED


class NonfiniteError(RunError):
    """A run whose loss did not stay finite: made again, it would end in the same way."""


class Stopped(KeyboardInterrupt):
    """Work that was asked to stop before its end, and that the same command continues. Exit code 75."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name that a mistyped word is most like; None: it is like none of them.

    >>> nearest("flsh", ["transformer", "flash"])
    'flash'
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def one_of_names(value: object, names: Iterable[str]) -> str | None:
    """What a value must be, where it is none of these names: the names, and the most similar one; None: it is one.

    >>> one_of_names("flsh", ["transformer", "flash"])
    'one of transformer, flash (did you mean flash?)'
    """
    names = list(names)
    if value in names:
        return None
    near = nearest(str(value), names)
    return f"one of {', '.join(names)}" + (f" (did you mean {near}?)" if near else "")


def missing_package(name: str, extra: str) -> InputError:
    """The error for a package that is not installed, and that an extra of pyproject.toml has."""
    return InputError(
        f"{name} is not installed, and this needs it: run pip install -e '.[{extra}]' in the folder of flash_lm's "
        "repository"
    )


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, short enough to quote in a sentence."""
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
