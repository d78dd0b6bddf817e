"""The folder of a run: config.json and tokenizer/, written once, and changes.jsonl.

What a resumed run changes is a line of changes.jsonl; config.json stays what the run began with.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from flash_lm.config import filled, plugins_of, unread_keys, upgrade
from flash_lm.data.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from flash_lm.errors import InputError
from flash_lm.jsonl import append_jsonl, read_jsonl
from flash_lm.models.family import unread
from flash_lm.moved import places
from flash_lm.plugins import import_plugins
from flash_lm.provenance import config_hash
from flash_lm.schema import SECTIONS
from flash_lm.training import lock
from flash_lm.training.exported import is_export
from flash_lm.training.hosts import is_first, of_all_hosts
from flash_lm.training.metrics import read_lines

_CONFIG, _CHANGES, _TOKENIZER = "config.json", "changes.jsonl", "tokenizer"
_PARTIAL = f"{_CONFIG}.partial"
_BEFORE_CONFIG = (lock.NAME, _PARTIAL)  # what a run that was killed in its first moments may leave

# Keys that may differ when a run is resumed: what they change of the model is rounding, or nothing.
FREE = (
    "mesh.",
    "model.remat",
    "model.scan_layers",
    "model.kernels",
    "model.state_dtype",
    "model.quadratic.",
    "data.path",  # its content is checked
    "data.cache_dir",
    "train.loss_chunk",
    "train.on_nonfinite",
    "train.best_metric",
    "train.log_every",
    "train.eval_",
    "train.checkpoint_every",
    "train.keep",
)
# Those that a branch may change beside them: its schedule.
_OF_A_BRANCH = (
    "train.branch_from",
    "train.steps",
    "train.learning_rate",
    "train.end_learning_rate",
    "train.warmup_steps",
    "train.schedule",
    "train.decay_steps",
    "train.boundaries",
)
# What a branch, whose state is its parent's, has no use for.
_OF_A_BEGINNING = ("train.init_from", "train.init_positions")
_PLACES = ("data.path", "data.cache_dir")
# Checkpoints know their run by the rest of its config.json. The list is that of the oldest runs and never changes.
_NOT_IN_FINGERPRINT = (
    "data.",
    "mesh.",
    "train.log_every",
    "train.eval_",
    "train.checkpoint_every",
    "train.keep",
)


def check_config(workdir: pathlib.Path, config: Any) -> Any:
    """Checks that a run in `workdir`, if there is one, may go on with this config.

    Returns:
        The config to go on with: keys that it leaves open are those of the run.

    Raises:
        InputError: it was another; or something that is not a run is there.
    """
    if not workdir.exists():
        return config
    names = [path.name for path in workdir.iterdir()] if workdir.is_dir() else [workdir.name]
    names = [name for name in names if name not in _BEFORE_CONFIG]
    if not names:
        return config
    if is_export(workdir):
        raise InputError(
            f"{workdir} is an exported model: choose another --workdir, and start from it with "
            f"--config.train.init_from={workdir}"
        )
    if _CONFIG not in names:
        raise InputError(f"{workdir} exists and is not a run of flash_lm: choose another --workdir")
    config, changes = _compared(workdir, config)
    if differing := {key: told for key, told in changes.items() if not _is_free(key, config)}:
        of_a_branch = set(differing) <= set(_OF_A_BRANCH)
        advice = f", or go on in a new one with --config.train.branch_from={workdir}" if of_a_branch else ""
        raise InputError(
            f"{workdir} holds a run of another config ({_told(differing)}): choose another --workdir{advice}"
        )
    return config


def check_branch(parent: pathlib.Path, config: Any) -> Any:
    """Checks that a config differs from its parent's in its schedule alone.

    Returns:
        The config to begin with: other keys that it leaves open are those of the parent.

    Raises:
        InputError: there is no such run, or its config is another.
    """
    if is_export(parent):
        raise InputError(f"{parent} is an exported model, without a state to go on from: use train.init_from={parent}")
    ours = (*_OF_A_BRANCH, *_OF_A_BEGINNING)
    config, changes = _compared(parent, config, but=ours)
    differing = {key: told for key, told in changes.items() if not _is_free(key, config) and key not in ours}
    if differing:
        raise InputError(
            f"train.branch_from={config.train.branch_from} is a run of another config ({_told(differing)}): a branch "
            f"changes {', '.join(_OF_A_BRANCH[1:])} and what a resumed run may"
        )
    return config


def own_tokenizer(workdir: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of the run in `workdir`; None: there is no run yet."""
    return load_tokenizer(workdir / _TOKENIZER) if (workdir / _TOKENIZER).exists() else None


def write(workdir: pathlib.Path, config: Any, tokenizer: Tokenizer) -> None:
    """Writes config and tokenizer, unless they are there, and what this resume changes."""
    of_all_hosts(None)  # they have all looked
    if is_first():
        if (workdir / _CONFIG).exists():
            if changes := {key: now for key, (_, now) in _compared(workdir, config)[1].items()}:
                append_jsonl(workdir / _CHANGES, [changes])
        else:
            (workdir / _PARTIAL).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
            os.replace(workdir / _PARTIAL, workdir / _CONFIG)
        if not (workdir / _TOKENIZER).exists():
            partial = workdir / "tokenizer.partial"
            save_tokenizer(tokenizer, partial)
            os.replace(partial, workdir / _TOKENIZER)
    of_all_hosts(None)


def check_nothing_lost(workdir: pathlib.Path) -> None:
    """Checks that a run without a checkpoint has not come so far that it must have had one.

    Raises:
        InputError: it has.
    """
    if not (workdir / _CONFIG).exists():
        return
    config = read_config(workdir)
    every = config.train.checkpoint_every
    done = max((line["step"] for line in read_lines(workdir / "metrics.jsonl")), default=0)
    # A checkpoint is whole before the next one is begun.
    if every and done > 2 * every:
        raise InputError(
            f"{workdir}/metrics.jsonl tells of {done} steps, and there is no checkpoint: put a copy back, or choose "
            f"another --workdir"
        )


def fingerprint(workdir: pathlib.Path) -> str | None:
    """Of what config.json, which is written once in the life of a run, says of model and training; None: there is none.

    Of the file as it is: a key that a later version adds is not in it. Where the corpus lies may change.
    """
    path = workdir / _CONFIG
    if not path.exists():
        return None
    flat = _flat(json.loads(path.read_text()))
    kept = {key: flat[key] for key in sorted(flat) if not key.startswith(_NOT_IN_FINGERPRINT)}
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def hash_of_config(workdir: pathlib.Path) -> str:
    """Of config.json as it was written, but for where on that machine the corpus and its cache lie."""
    return config_hash(without_places(ConfigDict(_of_run(json.loads((workdir / _CONFIG).read_text())))))


def without_places(config: Any) -> dict[str, Any]:
    """The config, flat, but for where on this machine the corpus and its cache lie."""
    return {key: value for key, value in _flat(config.to_dict()).items() if key not in _PLACES}


def read_config(workdir: pathlib.Path) -> Any:
    """The config of the run in `workdir`, with what resuming it has changed.

    Raises:
        InputError: there is no run, or its config.json is damaged.
    """
    path = pathlib.Path(workdir) / _CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise InputError(
            f"{workdir} holds no run: train one there with python -m flash_lm.train --workdir={workdir}"
        ) from None
    except UnicodeDecodeError:
        raise _damaged(path) from None
    try:
        values = _of_run(json.loads(text))
    except ValueError:
        raise _damaged(path) from None
    if isinstance(values, dict) and "model_type" in values:
        raise InputError(
            f"{workdir} is a model of transformers: make it one of flash_lm by python -m flash_lm.import_model "
            f"--model={workdir} --out=…"
        )
    if not isinstance(values, dict) or not all(isinstance(values.get(x), dict) for x in ("model", "data", "train")):
        raise _damaged(path)
    import_plugins(plugins_of(values), pathlib.Path(workdir))
    for group, section in (name.split(".") for name in SECTIONS):
        if not isinstance(values[group].get(section, {}), dict):
            raise _damaged(path)
    config = ConfigDict(upgrade(_tuples(values)))
    changes = path.with_name(_CHANGES)
    for line in read_jsonl(changes) if changes.exists() else []:
        if "plugins" in line:  # which nothing writes there, and which would be run
            raise _damaged(changes)
        config.update_from_flattened_dict({place: x for key, x in _tuples(line).items() for place in places(key)})
    return config


def _of_run(values: Any) -> Any:
    """What a config.json says of a run; that of an exported model says more."""
    return values["config"] if isinstance(values, dict) and "config" in values else values


def _damaged(path: pathlib.Path) -> InputError:
    return InputError(f"{path} is damaged: restore it, or train into another --workdir")


def _is_free(key: str, config: Any) -> bool:
    # Nothing is drawn for each microbatch, so their number changes the order of a sum alone.
    model = config.get("model", {})
    draws = model.get("dropout") or model.get("favor", {}).get("redraw")
    return key.startswith(FREE) or (key == "train.accumulate" and not draws)


def _compared(workdir: pathlib.Path, config: Any, but: tuple[str, ...] = ()) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """A config with what it leaves open as the run there has it, and by key what differs: of the run, and of it.

    Args:
        workdir: of the run.
        config: of now.
        but: keys that stay open.
    """
    raw, config = _flat(read_config(workdir).to_dict()), config.copy_and_resolve_references()
    left_open = {key for key, value in _flat(config.to_dict()).items() if value is None and key not in but}
    config.update_from_flattened_dict({key: raw[key] for key in left_open if raw.get(key) is not None})
    before, now = (_flat(filled(x.to_dict())) for x in (read_config(workdir), config))
    differing = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    return config, {key: (before.get(key), now.get(key)) for key in sorted(differing - _meaningless(before, now))}


def _meaningless(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Keys that neither of two flat configs uses."""
    kept = set() if before["data.streaming"] or now.get("data.streaming") else {"data.shuffle_buffer"}
    families = now.get("model.pattern") or (str(now.get("model.family")),)
    return kept | unread_keys(now) | unread(families)


def _told(changes: dict[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key}={there} there, {here} here" for key, (there, here) in changes.items())


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return flatten_dict(tree, sep=".")


def _tuples(value: Any) -> Any:
    """JSON has no tuples, and configs have no lists."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
