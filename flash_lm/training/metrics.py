"""Writes metrics to metrics.jsonl (the record) and to loggers, and shows the progress."""

import contextlib
import errno
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from flash_lm.runs.hosts import is_first
from flash_lm.runs.jsonl import read_lines, write_jsonl
from flash_lm.runs.local_copy import GrowingFiles
from flash_lm.training.loggers import TRACKER_FILES, Logger

# Keys of timings and of memory; all others are bit for bit the same when a run is repeated.
_FILE = "metrics.jsonl"
TIMES = frozenset({"train_seconds", "step_ms", "tokens_per_second", "first_step_s", "mfu", "memory_bytes"})
_now = time.monotonic
_EVERY_S = 30.0  # between two lines of progress where there is no terminal


class MetricsWriter:
    """Writes each metric line to metrics.jsonl and the loggers, and shows the progress.

    With several hosts, only the first one writes. In a terminal or a notebook the progress is a bar, elsewhere, such as
    in a cluster's log, a line now and then.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        step: int,
        steps: int,
        check_lock: Callable[[], None] = lambda: None,
        name: str = "",
        bar: bool = True,
        open_loggers: Callable[[pathlib.Path], Sequence[Logger]] = lambda folder: (),
    ):
        """Opens the files to continue after `step`; lines of later steps and truncated lines are removed.

        Args:
            workdir: folder of the run.
            step: step that the run resumes from.
            steps: number of steps of the run.
            check_lock: called before anything is written; raises RunError if the folder is not ours any more.
            name: put before each message, where several runs write.
            bar: whether the progress is shown.
            open_loggers: called on the first host with the folder for the loggers' files.
        """
        # metrics.jsonl; lines after the checkpoint will be written again.
        first = is_first()
        self._files = GrowingFiles(workdir, (_FILE, *TRACKER_FILES) if first else ())
        self._path, self._name, self._check_lock = self._files.folder / _FILE, name, check_lock
        path = self._path
        if first:
            _truncate(path, step)
        self._file = open(path if first else os.devnull, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (see close)
        self._loggers = open_loggers(self._files.folder) if first else ()

        # The progress: a bar that is drawn again and again only where somebody sees it.
        shown = first and bar
        has_bar = shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True, disable=not has_bar)
        self._steps, self._has_lines, self._said = steps, shown and not has_bar, -_EVERY_S

    def write(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Writes one line: {"step", "split", **values}."""
        self._check_lock()
        with self._name_file_in_errors():
            self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        for logger in self._loggers:
            logger.log(step, split, values)

    def progress(self, step: int, shown: dict[str, str] | None = None) -> None:
        """Moves the progress to `step`.

        Args:
            step: number of steps done.
            shown: what is new of the last logged step, in words by name.
        """
        if shown:
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)
        now = _now()
        if shown and self._has_lines and (now - self._said >= _EVERY_S or step == self._steps):
            self._said = now
            self.say(f"step {step:,} of {self._steps:,}: {', '.join(f'{name} {x}' for name, x in shown.items())}")

    def say(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if not is_first():
            return
        try:
            self._bar.write(f"{self._name}: {text}" if self._name else text)
            if not sys.stdout.isatty():
                sys.stdout.flush()  # a cluster's log is read while the run goes on
        except OSError as error:
            if error.errno != errno.EIO:  # the terminal is closed, and the run is to be saved
                raise

    def flush(self) -> None:
        """Flushes all lines to disk: called before a checkpoint that includes them is committed."""
        self._check_lock()
        # The line must be on the disk itself, or a crash of the machine could leave a checkpoint without it.
        with self._name_file_in_errors():
            self._file.flush()
            if is_first():
                os.fsync(self._file.fileno())
            for logger in self._loggers:
                logger.flush()
        self._files.upload()

    def upload(self) -> None:
        """Writes all lines to an object store; a local folder has them."""
        if self._files.remote:
            self.flush()

    def close(self) -> None:
        """Flushes and closes, all of it even if the disk is full."""
        self._bar.close()
        with contextlib.ExitStack() as stack:
            stack.callback(self._upload_rest)
            for logger in self._loggers:
                stack.callback(logger.close)
            with self._name_file_in_errors():
                self._file.close()

    def _upload_rest(self) -> None:
        """Uploads the lines after the last save, and removes the local copy."""
        try:
            self._check_lock()
            self._files.upload()
        finally:
            self._files.close()

    @contextlib.contextmanager
    def _name_file_in_errors(self) -> Iterator[None]:
        """Adds the file's name to an error of writing, which has none."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise


def _truncate(path: pathlib.Path, step: int) -> None:
    """Keeps the complete lines up to `step`; the file is rewritten and renamed."""
    partial = path.with_suffix(".partial")
    write_jsonl(partial, [line for line in read_lines(path) if line["step"] <= step])
    os.replace(partial, path)
