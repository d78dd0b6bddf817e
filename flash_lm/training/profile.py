"""A trace of some training steps, which TensorBoard and Perfetto open."""

import pathlib

import jax

from flash_lm.errors import InputError

Span = tuple[int, int]  # steps done before the first one that is traced, and after the last one


def parse_span(text: str) -> Span:
    """START:STOP.

    Raises:
        InputError: it is something else.
    """
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise InputError(f"--profile={text} must be two numbers of steps, the smaller one first, such as 20:25")
    return int(start), int(stop)


def check_span(span: Span, steps: int) -> None:
    """Checks that a run of so many steps has a span.

    Raises:
        InputError: it has not.
    """
    if not span[1] <= steps:
        raise InputError(f"--profile={span[0]}:{span[1]} must lie within the {steps} steps of --config.train.steps")


class Profile:
    """Traces the steps of a span, as far as a run comes to them; inert without a span."""

    def __init__(self, folder: pathlib.Path, span: Span | None):
        """Starts nothing. `folder`: where the trace goes."""
        self.folder = folder
        self._start, self._stop = span or (0, 0)
        self.on = False

    def is_due(self, step: int) -> bool:
        """Whether the trace is to start, with this number of steps done."""
        return not self.on and self._start <= step < self._stop

    def is_over(self, step: int) -> bool:
        """Whether a trace is on, and its last step has been given to the device."""
        return self.on and step >= self._stop

    def start(self) -> None:
        """Wait for the device first: what it still has to do is not of the span."""
        # Several hosts would look for each other's files, if they share the folder.
        jax.profiler.start_trace(str(self.folder), create_perfetto_trace=jax.process_count() == 1)
        self.on = True

    def write(self) -> None:
        """Ends the trace; wait for the device first."""
        jax.profiler.stop_trace()
        self.on = False
