"""What ends a command with a clear line instead of a traceback."""


class InputError(ValueError):
    """Bad input: what was wrong, what was expected, what to change. Exit code 2; one line a problem."""


class RunError(RuntimeError):
    """A run that cannot go on although its input was good. Exit code 1."""
