"""The folder of a run: config.json and tokenizer/, written once and checked at every resume."""

import hashlib
import json
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from flash_lm.config import upgrade
from flash_lm.data.loading import Splits
from flash_lm.data.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from flash_lm.errors import InputError
from flash_lm.training.hosts import is_first, of_all_hosts
from flash_lm.training.metrics import read_lines

_PARTIAL = "config.json.partial"

# Keys that may differ when a run is resumed: they change neither the model nor what it is trained on.
_FREE = ("mesh.", "data.cache_dir", "train.log_every", "train.eval_", "train.checkpoint_every", "train.keep")
_PLACES = ("data.path", "data.cache_dir")


def check_config(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Checks that a run in `workdir`, if there is one, was started with this config.

    Raises:
        InputError: it was another; or something that is no run is there.
    """
    if not workdir.exists():
        return
    # A run that was killed in its first moments leaves nothing but a partial file.
    names = [path.name for path in workdir.iterdir() if path.name != _PARTIAL] if workdir.is_dir() else [workdir.name]
    if not names:
        return
    if "config.json" not in names:
        raise InputError(f"{workdir} exists and is no run of flash_lm: choose another --workdir")
    before, now = _flat(read_config(workdir).to_dict()), _flat(config.to_dict())
    differing = [
        f"{key}={before.get(key)} there, {now.get(key)} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(_FREE)
    ]
    if differing:
        raise InputError(f"{workdir} holds a run of another config ({'; '.join(differing)}): choose another --workdir")


def check_tokenizer(workdir: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Checks that the run in `workdir`, if there is one, was trained with this tokenizer.

    Raises:
        InputError: the tokenizer is another.
    """
    if not (workdir / "tokenizer").exists():
        return
    there = load_tokenizer(workdir / "tokenizer")
    if there.fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"{workdir} was trained with another tokenizer ({there.vocab_size} tokens) than that of config.data "
            f"({tokenizer.vocab_size} tokens): restore the corpus or data.tokenizer_path, or choose another --workdir"
        )


def check_corpus(trained_on: str, corpus: Splits) -> None:
    """Checks a checkpoint's fingerprint of its corpus.

    Raises:
        InputError: the corpus has changed.
    """
    if corpus.fingerprint != trained_on:
        raise InputError(
            f"corpus {corpus.name} is not the one that the run began with, its content has changed: restore it, or "
            f"choose another --workdir"
        )


def write(workdir: pathlib.Path, config: ConfigDict, tokenizer: Tokenizer) -> None:
    """Writes config and tokenizer, unless they are there; then they have been checked to be the same."""
    of_all_hosts(None)  # they have all looked
    if is_first():
        workdir.mkdir(parents=True, exist_ok=True)
        if not (workdir / "config.json").exists():
            (workdir / _PARTIAL).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
            os.replace(workdir / _PARTIAL, workdir / "config.json")
        if not (workdir / "tokenizer").exists():
            partial = workdir / "tokenizer.partial"
            save_tokenizer(tokenizer, partial)
            os.replace(partial, workdir / "tokenizer")
    of_all_hosts(None)


def check_nothing_lost(workdir: pathlib.Path) -> None:
    """Checks that a run without a checkpoint has not come so far that it must have had one.

    Raises:
        InputError: it has.
    """
    config: Any = read_config(workdir)
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
    path = workdir / "config.json"
    if not path.exists():
        return None
    flat = _flat(json.loads(path.read_text()))
    kept = {key: flat[key] for key in sorted(flat) if not key.startswith(("data.", *_FREE))}
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def without_places(config: ConfigDict) -> dict[str, Any]:
    """The config, flat, but for where on this machine the corpus and its cache lie."""
    return {key: value for key, value in _flat(config.to_dict()).items() if key not in _PLACES}


def read_config(workdir: pathlib.Path) -> ConfigDict:
    """The config of the run in `workdir`.

    Raises:
        InputError: there is no run.
    """
    try:
        return ConfigDict(upgrade(_tuples(json.loads((workdir / "config.json").read_text()))))
    except OSError:
        raise InputError(
            f"{workdir} holds no run: train one there with python -m flash_lm.train --workdir={workdir}"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{workdir}/config.json is damaged: restore it, or train into another --workdir") from None


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _tuples(value: Any) -> Any:
    """JSON has no tuples, and configs have no lists."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
