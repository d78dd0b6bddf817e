"""The run folder: config.json, tokenizer/ and perhaps labels.json, written once, and changes.jsonl.

Changes made by a resumed run are lines of changes.jsonl; config.json stays as the run began.
"""

import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from flash_lm.config.experiment import BATCH_TOKENS, Config, identifying_keys, upgrade
from flash_lm.config.keys import SECTIONS, type_problems
from flash_lm.config.plugins import check_plugins, plugin_names
from flash_lm.config.renamed_keys import names_today
from flash_lm.errors import InputError, first_line
from flash_lm.runs import lock
from flash_lm.runs.json_file import load_json
from flash_lm.runs.jsonl import append_jsonl, read_lines
from flash_lm.runs.labels import NAME as LABELS
from flash_lm.runs.provenance import config_hash
from flash_lm.runs.storage import reach, write_text

_CONFIG, _CHANGES = "config.json", "changes.jsonl"
_PARTIAL = f"{_CONFIG}.partial"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # of an exported model
_LISTED = 3  # problems of a damaged file
_BEFORE_CONFIG = (lock.NAME, _PARTIAL, LABELS)  # what a run may leave if it is killed right after its start
_LOCATIONS = ("data.path", "data.cache_dir")
# A checkpoint has a hash of the rest of config.json, so a change of this list would make checkpoints unreadable.
_NOT_IN_FINGERPRINT = (
    "data.",
    "mesh.",
    "train.log_every",
    "train.log_to",
    "train.project",
    "train.sample_",
    "train.eval_",
    "train.checkpoint_every",
    "train.keep",
)


class RunFolder:
    """A run's folder, or an exported model's. config.json is read once, when it is first asked for."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads nothing yet."""
        self.path = reach(path)

    def holds_run(self) -> bool:
        """Whether a run has begun in this folder.

        Raises:
            InputError: the folder holds something other than a run.
        """
        try:
            names = [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            names = [self.path.name]
        # Files that a run writes before its config do not count.
        names = [name for name in names if name not in _BEFORE_CONFIG]
        if not names:
            return False
        if is_export(self.path):
            raise InputError(
                f"{self.path} is an exported model: choose another --workdir, and start from it with "
                f"--config.train.init_from={self.path}"
            )
        if _CONFIG not in names:
            raise InputError(f"{self.path} exists and is not a run of flash_lm: choose another --workdir")
        return True

    @functools.cached_property
    def written(self) -> Any:
        """The JSON value of config.json, as it was written when the run began.

        Raises:
            InputError: the folder has no run, or the file is damaged.
        """
        try:
            return load_json(self.path / _CONFIG)
        except OSError:
            raise InputError(
                f"{self.path} holds no run: train one there with flash-lm train --config=… --workdir={self.path}"
            ) from None
        except ValueError:
            raise _damage_error(self.path / _CONFIG) from None

    @functools.cached_property
    def config(self) -> Any:
        """The run's config with the changes of its resumes; keys that it left open are open.

        Raises:
            InputError: as `written`; or the config asks for plugins that the user has not named.
        """
        return _config_of(self.path, self.written)

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """Hash of what config.json says of model and training, as written. None: no config.json.

        Keys that a later version adds do not count. The path of the corpus may change.
        """
        if not (self.path / _CONFIG).exists():
            return None
        flat = flatten_dict(self.written, sep=".")
        kept = {key: flat[key] for key in sorted(flat) if not key.startswith(_NOT_IN_FINGERPRINT)}
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]

    @property
    def hash(self) -> str:
        """`run_hash` of config.json as written."""
        return run_hash(_config_values(self.written))

    def check_nothing_lost(self) -> None:
        """Checks that a run without checkpoints has not gone so far that it must have had one.

        Raises:
            InputError: it has.
        """
        every = self.config.train.checkpoint_every
        done = max((line["step"] for line in read_lines(self.path / "metrics.jsonl")), default=0)
        # A checkpoint is complete before the next one is started.
        if every and done > 2 * every:
            raise InputError(
                f"{self.path}/metrics.jsonl has {done} steps, but there is no checkpoint: restore a copy, or choose "
                f"another --workdir"
            )

    def write(self, config: ConfigDict) -> None:
        """Writes config.json atomically; the file is written once."""
        write_text(self.path / _CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")

    def changes(self) -> int:
        """The number of lines of changes.jsonl, one for each resume that changed a key."""
        return len(read_lines(self.path / _CHANGES))

    def record_changes(self, changes: Mapping[str, Any]) -> None:
        """Adds a line to changes.jsonl: what a resume changes, by key."""
        append_jsonl(self.path / _CHANGES, [dict(changes)])


def is_export(folder: pathlib.Path) -> bool:
    """Whether a folder holds an exported model rather than a run."""
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def run_hash(config: Mapping[str, Any]) -> str:
    """Hash of a config as nested dicts, without where its corpora and cache are; a key that is added later keeps it."""
    # The shares of a mixture count, and where its sources are does not.
    flat = identifying_keys(flatten_dict(config, sep="."))
    if flat.get("data.tokens_per_batch") is None:  # on one device
        flat["data.tokens_per_batch"] = BATCH_TOKENS
    if mixture := flat.get("data.mixture"):
        flat["data.mixture"] = [share for _, share in mixture]
    return config_hash({key: value for key, value in flat.items() if key not in _LOCATIONS})


def _config_of(folder: pathlib.Path, written: Any) -> Any:
    """Builds the config of a run from the JSON value of its config.json, and the lines of changes.jsonl."""
    path, values = folder / _CONFIG, _config_values(written)
    if isinstance(values, dict) and "model_type" in values:
        raise InputError(
            f"{folder} is a model of transformers: convert it with flash-lm import --model={folder} --out=…"
        )
    if not isinstance(values, dict) or not all(isinstance(values.get(x), dict) for x in ("model", "data", "train")):
        raise _damage_error(path)
    # Plugins must be imported before their sections are checked.
    check_plugins(plugin_names(values), folder)
    for group, section in (name.split(".") for name in SECTIONS):
        if not isinstance(values[group].get(section, {}), dict):
            raise _damage_error(path)
    # Apply the changes of each resume to the config as it was written.
    config = _check_types(path, upgrade(_tuples(values)))
    changes = path.with_name(_CHANGES)
    for line in read_lines(changes):
        if "plugins" in line:  # we never write this, and it would be read after they are checked
            raise _damage_error(changes)
        try:
            config.update_from_flattened_dict(
                {name: x for key, x in _tuples(line).items() for name in names_today(key)}
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # keys or values that no run has
            raise _damage_error(changes, [first_line(error)]) from None
    return _check_types(changes, config.to_dict())


def _check_types(path: pathlib.Path, values: dict[str, Any]) -> Any:
    """Makes a config from the values of a file; raises InputError if keys are missing or have wrong types."""
    if wrong := list(itertools.islice(type_problems(values, Config), _LISTED)):
        raise _damage_error(path, wrong)
    try:
        return ConfigDict(values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # names that no key can have
        raise _damage_error(path, [first_line(error)]) from None


def _config_values(values: Any) -> Any:
    """The config in the values of a config.json; that of an exported model has more in it."""
    return values["config"] if isinstance(values, dict) and "config" in values else values


def _damage_error(path: pathlib.Path, problems: Sequence[str] = ()) -> InputError:
    why = f" ({'; '.join(problems)})" if problems else ""
    return InputError.of([f"{path} is damaged{why}: restore it, or train into another --workdir"])


def _tuples(value: Any) -> Any:
    """Turns lists into tuples: JSON has no tuples, and configs have no lists."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
