"""Bad input: one clear line for the user, instead of a traceback."""


class InputError(ValueError):
    """What was wrong, what was expected and what to change. Commands print it and end with exit code 2."""
