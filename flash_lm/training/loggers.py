"""Where the lines of a run go besides metrics.jsonl: TensorBoard, trackers, a function of the user."""

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import pathlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flash_lm.config.registry import LOGGERS
from flash_lm.errors import InputError, first_line, missing_package
from flash_lm.runs.json_file import load_json

_log = logging.getLogger(__name__)
TRACKERS = ("trackio", "wandb")
TRACKER_FILES = tuple(f"{name}.json" for name in TRACKERS)  # of the run's folder
OnLog = Callable[[int, str, Mapping[str, Any]], None]  # called with step, split and values


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """The run whose lines a logger gets.

    Attributes:
        folder: its folder on this machine, for the logger's own files.
        name: what people call it.
        project: train.project.
        config: the config, as nested values.
        step: the step from which it goes on.
    """

    folder: pathlib.Path
    name: str
    project: str
    config: Mapping[str, Any]
    step: int


class Logger:
    """Gets each line of a run once it is in metrics.jsonl; a subclass defines `log`."""

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Takes a line: numbers by name, or the text of a sample."""
        raise NotImplementedError

    def flush(self) -> None:
        """Writes what is pending."""

    def close(self) -> None:
        """Ends the work."""


def register_logger(name: str, factory: Callable[[LoggedRun], Logger]) -> None:
    """Adds a logger to the registry, for `train.log_to`; the factory is called when a run begins or goes on."""
    LOGGERS.register(name, factory)


class TensorBoard(Logger):
    """Writes event files to the folder tensorboard/ of the run."""

    def __init__(self, run: LoggedRun):
        """Events after the step of the start will be written again, and TensorBoard is told so."""
        from tensorboardX import SummaryWriter  # noqa: PLC0415 (slow to import)

        # Its thread dies if the disk is full, and a bounded queue (0: no bound) would then block forever.
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1, max_queue=0)

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Adds scalars named SPLIT/NAME, and texts."""
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(f"{split}/{name}", value, step)

    def flush(self) -> None:
        """Writes the queue."""
        self._writer.flush()

    def close(self) -> None:
        """Ends its thread."""
        try:
            self._writer.close()
        except OSError:  # else its thread, and its own attempt at the end of the process, would print tracebacks
            writer: Any = self._writer.file_writer
            writer.event_writer._worker.stop()
            writer.event_writer._closed = True


class Tracker(Logger):
    """Sends lines to Weights & Biases or Trackio, whose packages have the same three functions.

    A file in the run's folder has the run's name there and the last step that was sent, by split: a resumed run or a
    replay sends no line twice, wherever the folder is by then.
    """

    def __init__(self, name: str, run: LoggedRun):
        """Opens the run there, or the one that it was before.

        Raises:
            InputError: the package is not installed.
        """
        package = import_tracker(name)
        self._file = run.folder / f"{name}.json"
        known = load_json(self._file) if self._file.exists() else {}
        if known.get("project") != run.project:
            known = {"project": run.project, "name": run.name, "id": secrets.token_hex(6), "sent": {}}
        self._known, self._sent = known, known["sent"]
        self._keep()
        self._pending: tuple[int, dict[str, Any]] | None = None
        # Trackio knows a run by its name, wandb by its id.
        label, identity = known["name"], known["id"]
        who: dict[str, str] = {"name": f"{label}-{identity}"}
        if name == "wandb":  # which may have several runs in a process
            who = {"name": label, "id": identity, "reinit": "create_new"}
        self._run = package.init(project=run.project, config=dict(run.config), resume="allow", **who)

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Sends values as SPLIT/NAME; those of one step together, since wandb takes no earlier step again."""
        if step <= self._sent.get(split, -1):
            return
        if self._pending and self._pending[0] != step:
            self.flush()
        self._pending = self._pending or (step, {})
        self._pending[1].update({f"{split}/{name}": value for name, value in values.items()})
        self._sent[split] = step

    def flush(self) -> None:
        """Sends the values of the last step."""
        if self._pending:
            step, values = self._pending
            self._run.log(values, step=step)
            self._pending = None
            self._keep()

    def close(self) -> None:
        """Sends the rest, and ends the run there."""
        self.flush()
        self._run.finish()

    def _keep(self) -> None:
        self._file.write_text(json.dumps(self._known) + "\n", encoding="utf-8")


class FunctionLogger(Logger):
    """Calls a function of the user with each line."""

    def __init__(self, function: OnLog):
        """Keeps the function."""
        self._function = function

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Calls it."""
        self._function(step, split, values)


class Patient(Logger):
    """Another logger, whose failures do not end the run: one warning, and no more lines to it."""

    def __init__(self, name: str, logger: Logger):
        """Keeps the logger and its name."""
        self._name, self._logger = name, logger

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Passes a line on."""
        self._try(lambda: self._logger.log(step, split, values))

    def flush(self) -> None:
        """Passes it on."""
        self._try(self._logger.flush)

    def close(self) -> None:
        """Passes it on, also after a failure: the run there is ended."""
        with contextlib.suppress(Exception):
            self._logger.close()

    def _try(self, call: Callable[[], None]) -> None:
        if self._name:
            try:
                call()
            except Exception as error:  # of the network, of another package
                _log.warning("%s failed (%s): it gets no more lines of this run", self._name, first_line(error))
                self._name = ""


def import_tracker(name: str) -> Any:
    """The package of a tracker.

    Raises:
        InputError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing_package(name, name) from None


def check_loggers(names: Iterable[str]) -> None:
    """Checks the loggers before anything is written.

    Raises:
        InputError: a tracker's package is not installed.
    """
    for name in set(names) & {*TRACKERS}:
        import_tracker(name)


def open_loggers(names: Sequence[str], run: LoggedRun, on_log: OnLog | None = None) -> list[Logger]:
    """Opens the loggers of a run.

    TensorBoard's errors are those of the disk, and end the run like those of metrics.jsonl.

    Raises:
        InputError: one cannot begin.
    """
    loggers = []
    for name in names:
        try:
            logger = LOGGERS[name](run)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"train.log_to={name} cannot begin: {first_line(error)}") from error
        loggers.append(logger if name == "tensorboard" else Patient(name, logger))
    return loggers + ([FunctionLogger(on_log)] if on_log else [])


def replay(lines: Iterable[Mapping[str, Any]], logger: Logger) -> None:
    """Sends lines of metrics.jsonl to a logger, in their order, and closes it."""
    for line in lines:
        logger.log(line["step"], line["split"], {key: x for key, x in line.items() if key not in ("step", "split")})
    logger.close()


register_logger("tensorboard", TensorBoard)
for _name in TRACKERS:
    register_logger(_name, functools.partial(Tracker, _name))
