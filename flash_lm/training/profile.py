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


def check_span(span: Span, done: int, steps: int) -> None:
    """Checks that a run comes to the span.

    Args:
        span: of `parse_span`.
        done: steps of the run that are done.
        steps: of the whole run.

    Raises:
        InputError: it does not.
    """
    if not done <= span[0] < steps:
        raise InputError(
            f"--profile={span[0]}:{span[1]}: the run has {done} of {steps} steps behind it, choose later ones"
        )


class Profile:
    """Traces the steps of a span that a run comes to; inert without a span."""

    def __init__(self, folder: pathlib.Path, span: Span | None):
        """Starts nothing. `folder`: where the trace goes."""
        self.folder = folder
        self._start, self._stop = span or (0, 0)
        self.on = False

    def start_if_due(self, step: int) -> None:
        """To be called before a step, with the number of steps done."""
        if not self.on and self._start <= step < self._stop:
            jax.profiler.start_trace(str(self.folder), create_perfetto_trace=True)
            self.on = True

    def is_over(self, step: int) -> bool:
        """Whether a trace is on whose last step has been given to the device."""
        return self.on and step >= self._stop

    def write(self) -> None:
        """Ends the trace; wait for the device first."""
        jax.profiler.stop_trace()
        self.on = False
