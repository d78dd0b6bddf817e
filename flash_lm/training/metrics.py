"""Writes metrics to metrics.jsonl (the record), TensorBoard, and a live progress line."""

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm

from flash_lm.runs.hosts import is_first
from flash_lm.runs.jsonl import read_lines, write_jsonl
from flash_lm.runs.local_copy import GrowingFiles

# Keys of timings; all others are bit for bit the same when a run is repeated.
_FILE = "metrics.jsonl"
TIMES = frozenset({"train_seconds", "step_ms", "tokens_per_second", "first_step_s"})


class MetricsWriter:
    """Writes each metric line to metrics.jsonl and TensorBoard, and updates the progress line.

    With several hosts, only the first one writes.
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
    ):
        """Opens the files to continue after `step`; lines of later steps and truncated lines are removed.

        Args:
            workdir: folder of the run.
            step: step that the run resumes from.
            steps: number of steps of the run.
            check_lock: called before anything is written; raises RunError if the folder is not ours any more.
            name: put before each message, where several runs write.
            bar: whether there is a progress line.
        """
        # metrics.jsonl; lines after the checkpoint will be written again.
        first = is_first()
        self._files = GrowingFiles(workdir, (_FILE,) if first else ())
        self._path, self._name, self._check_lock = self._files.folder / _FILE, name, check_lock
        path = self._path
        if first:
            _truncate(path, step)
        self._file = open(path if first else os.devnull, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (see close)
        # Its thread dies if the disk is full, and a bounded queue (0: no bound) would then block forever.
        options = {"purge_step": step + 1, "write_to_disk": first, "max_queue": 0}
        self._tensorboard = SummaryWriter(str(self._files.folder / "tensorboard"), **options)

        # The progress line.
        self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True, disable=not (first and bar))

    def write(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Writes one line: {"step", "split", **values}."""
        self._check_lock()
        with self._name_file_in_errors():
            self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{split}/{name}", value, step)

    def progress(self, step: int, **shown: float) -> None:
        """Moves the progress line to `step`; `shown` replaces its numbers."""
        if shown:
            self._bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()}, refresh=False)
        self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """Prints a line above the progress line."""
        if not is_first():
            return
        try:
            self._bar.write(f"{self._name}: {text}" if self._name else text)
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
            self._tensorboard.flush()
        self._files.upload()

    def upload(self) -> None:
        """Writes all lines to an object store; a local folder has them."""
        if self._files.remote:
            self.flush()

    def close(self) -> None:
        """Flushes and closes, all of it even if the disk is full."""
        self._bar.close()
        try:
            with self._name_file_in_errors():
                self._file.close()
        finally:
            self._close_tensorboard()
            self._upload_rest()

    def _upload_rest(self) -> None:
        """Uploads the lines after the last save, and removes the local copy."""
        try:
            self._check_lock()
            self._files.upload()
        finally:
            self._files.close()

    def _close_tensorboard(self) -> None:
        try:
            self._tensorboard.close()
        except OSError:  # else its thread, and its own attempt at the end of the process, would print tracebacks
            writer: Any = self._tensorboard.file_writer
            writer.event_writer._worker.stop()
            writer.event_writer._closed = True

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
