"""The folder of a run: config.json, tokenizer/ and perhaps labels.json, written once, and changes.jsonl.

Changes made by a resumed run are lines of changes.jsonl; config.json stays as the run began.
"""

import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from flash_lm.config import BATCH_TOKENS, Config, filled, plugins_of, telling, unread_keys, upgrade
from flash_lm.data.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from flash_lm.errors import InputError, first_line
from flash_lm.families.family import unread
from flash_lm.json_file import load_json
from flash_lm.jsonl import append_jsonl, read_lines
from flash_lm.moved import places
from flash_lm.plugins import check_plugins
from flash_lm.provenance import config_hash
from flash_lm.schema import SECTIONS, ill_typed
from flash_lm.training import labels as labels_file
from flash_lm.training import lock
from flash_lm.training.exported import is_export
from flash_lm.training.hosts import is_first, of_all_hosts

_CONFIG, _CHANGES, _TOKENIZER = "config.json", "changes.jsonl", "tokenizer"
_PARTIAL = f"{_CONFIG}.partial"
_LISTED = 3  # problems of a damaged file
_BEFORE_CONFIG = (lock.NAME, _PARTIAL, labels_file.NAME)  # what a run may leave if it is killed right after its start

# Keys that may change when a run is resumed: for the model they change rounding, or nothing.
FREE = (
    "mesh.",
    "model.remat",
    "model.scan_layers",
    "model.kernels",
    "model.state_dtype",
    "model.quadratic.",
    "data.path",  # the content is checked
    "data.cache_dir",
    "train.loss_chunk",
    "train.on_nonfinite",
    "train.best_metric",
    "train.log_every",
    "train.eval_",
    "train.stop_accuracy",
    "train.checkpoint_every",
    "train.keep",
)
# Keys that a branch may change as well: its schedule.
_OF_A_BRANCH = (
    "train.branch_from",
    "train.steps",
    "train.tokens",
    "train.learning_rate",
    "train.end_learning_rate",
    "train.warmup_steps",
    "train.schedule",
    "train.decay_steps",
    "train.boundaries",
)
# Keys that a branch does not use, since its state comes from its parent.
_OF_A_BEGINNING = ("train.init_from", "train.init_positions")
_PLACES = ("data.path", "data.cache_dir")
# A checkpoint identifies its run by the rest of config.json. The list is that of the oldest runs and never changes.
_NOT_IN_FINGERPRINT = (
    "data.",
    "mesh.",
    "train.log_every",
    "train.eval_",
    "train.checkpoint_every",
    "train.keep",
)


def check_config(workdir: pathlib.Path, config: Any) -> Any:
    """Checks that a run in `workdir`, if there is one, may continue with this config.

    Returns:
        The config to continue with: open keys are filled in from the run.

    Raises:
        InputError: the run had another config, or `workdir` holds something other than a run.
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
    if differing := {key: change for key, change in changes.items() if not _is_free(key, config)}:
        of_a_branch = set(differing) <= set(_OF_A_BRANCH)
        advice = f", or continue in a new one with --config.train.branch_from={workdir}" if of_a_branch else ""
        raise InputError(
            f"{workdir} holds a run of another config ({_listed(differing)}): choose another --workdir{advice}"
        )
    return config


def check_branch(parent: pathlib.Path, config: Any) -> Any:
    """Checks that a config differs from its parent's only in the schedule.

    Returns:
        The config to start with: other open keys are filled in from the parent.

    Raises:
        InputError: there is no such run, or its config differs elsewhere.
    """
    if is_export(parent):
        raise InputError(f"{parent} is an exported model without a training state: use train.init_from={parent}")
    ours = (*_OF_A_BRANCH, *_OF_A_BEGINNING)
    config, changes = _compared(parent, config, but=ours)
    differing = {key: change for key, change in changes.items() if not _is_free(key, config) and key not in ours}
    if differing:
        raise InputError(
            f"train.branch_from={config.train.branch_from} is a run of another config ({_listed(differing)}): a branch "
            f"may change only {', '.join(_OF_A_BRANCH[1:])}, and what a resumed run may change"
        )
    return config


def own_tokenizer(workdir: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of the run in `workdir`; None: there is no run yet."""
    return load_tokenizer(workdir / _TOKENIZER) if (workdir / _TOKENIZER).exists() else None


def write(workdir: pathlib.Path, config: Any, tokenizer: Tokenizer, labels: Sequence[str] = ()) -> None:
    """Writes config, tokenizer and labels if they are not there yet, and records what this resume changes."""
    of_all_hosts(None)  # all hosts have looked
    if is_first():
        if (workdir / _CONFIG).exists():
            if changes := {key: now for key, (_, now) in _compared(workdir, config)[1].items()}:
                append_jsonl(workdir / _CHANGES, [changes])
        else:
            labels_file.write_labels(workdir, labels)
            (workdir / _PARTIAL).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
            os.replace(workdir / _PARTIAL, workdir / _CONFIG)
        if not (workdir / _TOKENIZER).exists():
            partial = workdir / "tokenizer.partial"
            save_tokenizer(tokenizer, partial)
            os.replace(partial, workdir / _TOKENIZER)
    of_all_hosts(None)


def check_nothing_lost(workdir: pathlib.Path) -> None:
    """Checks that a run without checkpoints has not gone so far that it must have had one.

    Raises:
        InputError: it has.
    """
    if not (workdir / _CONFIG).exists():
        return
    config = read_config(workdir)
    every = config.train.checkpoint_every
    done = max((line["step"] for line in read_lines(workdir / "metrics.jsonl")), default=0)
    # A checkpoint is complete before the next one is started.
    if every and done > 2 * every:
        raise InputError(
            f"{workdir}/metrics.jsonl has {done} steps, but there is no checkpoint: restore a copy, or choose "
            f"another --workdir"
        )


def fingerprint(workdir: pathlib.Path) -> str | None:
    """Hash of what config.json says of model and training; the file is written once a run. None: there is none.

    The file is hashed as it is, so keys that a later version adds do not count. The place of the corpus may change.
    """
    path = workdir / _CONFIG
    if not path.exists():
        return None
    flat = _flat(load_json(path))
    kept = {key: flat[key] for key in sorted(flat) if not key.startswith(_NOT_IN_FINGERPRINT)}
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def hash_of_config(workdir: pathlib.Path) -> str:
    """`run_hash` of config.json as written."""
    return run_hash(_of_run(load_json(workdir / _CONFIG)))


def run_hash(config: Mapping[str, Any]) -> str:
    """Hash of a config as nested dicts, without where its corpora and cache are; keys of later versions keep it."""
    flat = telling(_flat(config))
    if flat.get("data.tokens_per_batch") is None:  # on one device
        flat["data.tokens_per_batch"] = BATCH_TOKENS
    if mixture := flat.get("data.mixture"):
        flat["data.mixture"] = [share for _, share in mixture]
    return config_hash({key: value for key, value in flat.items() if key not in _PLACES})


def read_config(workdir: pathlib.Path) -> Any:
    """The config of the run in `workdir`, with the changes of its resumes.

    Raises:
        InputError: there is no run, its config.json is damaged, or it asks for plugins that the user has not named.
    """
    path = pathlib.Path(workdir) / _CONFIG
    try:
        values = _of_run(load_json(path))
    except OSError:
        raise InputError(
            f"{workdir} holds no run: train one there with python -m flash_lm.train --config=… --workdir={workdir}"
        ) from None
    except ValueError:
        raise _damaged(path) from None
    if isinstance(values, dict) and "model_type" in values:
        raise InputError(
            f"{workdir} is a model of transformers: convert it with python -m flash_lm.import_model "
            f"--model={workdir} --out=…"
        )
    if not isinstance(values, dict) or not all(isinstance(values.get(x), dict) for x in ("model", "data", "train")):
        raise _damaged(path)
    check_plugins(plugins_of(values), pathlib.Path(workdir))
    for group, section in (name.split(".") for name in SECTIONS):
        if not isinstance(values[group].get(section, {}), dict):
            raise _damaged(path)
    config = _typed(path, upgrade(_tuples(values)))
    changes = path.with_name(_CHANGES)
    for line in read_lines(changes):
        if "plugins" in line:  # we never write this, and it would be read after they are checked
            raise _damaged(changes)
        try:
            config.update_from_flattened_dict({place: x for key, x in _tuples(line).items() for place in places(key)})
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # keys or values that no run has
            raise _damaged(changes, [first_line(error)]) from None
    return _typed(changes, config.to_dict())


def _typed(path: pathlib.Path, values: dict[str, Any]) -> Any:
    """The config with these values of a file; raises InputError if keys are missing or have wrong types."""
    if wrong := list(itertools.islice(ill_typed(values, Config), _LISTED)):
        raise _damaged(path, wrong)
    try:
        return ConfigDict(values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # names that no key can have
        raise _damaged(path, [first_line(error)]) from None


def _of_run(values: Any) -> Any:
    """The config of a run from config.json; that of an exported model has more in it."""
    return values["config"] if isinstance(values, dict) and "config" in values else values


def _damaged(path: pathlib.Path, problems: Sequence[str] = ()) -> InputError:
    why = f" ({'; '.join(problems)})" if problems else ""
    return InputError.of([f"{path} is damaged{why}: restore it, or train into another --workdir"])


def _is_free(key: str, config: Any) -> bool:
    # Microbatches have no random numbers of their own, so their number changes only the order of a sum.
    model = config.get("model", {})
    draws = model.get("dropout") or model.get("favor", {}).get("redraw")
    if key == "model.state_dtype" and config.get("train", {}).get("carry_state"):
        return False  # the checkpoint has a state
    return key.startswith(FREE) or (key == "train.accumulate" and not draws)


def _compared(workdir: pathlib.Path, config: Any, but: tuple[str, ...] = ()) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """Fills in the open keys of a config from the run there, and lists by key the differing values: (run's, config's).

    Args:
        workdir: folder of the run.
        config: the new config.
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
    encoder = now.get("model.encoder.family")
    families = (*(now.get("model.pattern") or (str(now.get("model.family")),)), *([encoder] if encoder else []))
    cross = now.get("model.cross.kind") if encoder else None
    return kept | unread_keys(now) | unread(families, cross)


def _listed(changes: dict[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key}={there} there, {here} here" for key, (there, here) in changes.items())


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return flatten_dict(tree, sep=".")


def _tuples(value: Any) -> Any:
    """JSON has no tuples, and configs have no lists."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
