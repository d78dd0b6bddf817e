"""Profiler traces of some training steps, to open in TensorBoard or Perfetto."""

import pathlib

import jax

from flash_lm.errors import InputError
from flash_lm.runs.local_copy import GrowingFiles

Span = tuple[int, int]  # number of steps done before the first traced one, and after the last one


def parse_span(text: str) -> Span:
    """Parses START:STOP.

    Raises:
        InputError: it is something else.
    """
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise InputError(f"--profile={text} must be two step numbers, the smaller one first, such as 20:25")
    return int(start), int(stop)


def check_span(span: Span, steps: int) -> None:
    """Checks that a span lies within a run.

    Raises:
        InputError: it does not.
    """
    if not span[1] <= steps:
        raise InputError(f"--profile={span[0]}:{span[1]} must lie within the {steps} steps of --config.train.steps")


class Profile:
    """Traces the steps of a span; does nothing without one."""

    def __init__(self, folder: pathlib.Path, span: Span | None):
        """Does not start a trace yet; `folder` is the trace's folder."""
        self.folder, self._files = folder, None
        self._start, self._stop = span or (0, 0)
        self.on = False

    def is_due(self, step: int) -> bool:
        """Whether to start the trace, after this number of steps."""
        return not self.on and self._start <= step < self._stop

    def is_over(self, step: int) -> bool:
        """Whether a trace is running, and its last step has been dispatched."""
        return self.on and step >= self._stop

    def start(self) -> None:
        """Starts the trace. Wait for the device first: its remaining work is not part of the span."""
        # If several hosts share the folder, they would look for each other's files.
        self._files = GrowingFiles(self.folder)
        jax.profiler.start_trace(str(self._files.folder), create_perfetto_trace=jax.process_count() == 1)
        self.on = True

    def write(self) -> None:
        """Ends the trace; wait for the device first."""
        jax.profiler.stop_trace()
        self.on = False
        if self._files is not None:
            self._files.upload()
            self._files.close()
