"""Chooses the kind of corpus by the files of `data.path`, so that a path alone says what to train on."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flash_lm.config.addresses import is_remote
from flash_lm.config.overrides import fit_pack
from flash_lm.config.registry import CORPORA
from flash_lm.data.files import find_files
from flash_lm.errors import InputError
from flash_lm.runs.storage import reach


def fit_corpus(config: Any, overrides: Sequence[str]) -> None:
    """Sets data.corpus to what the data.path or data.name of a command line needs, unless a word sets it.

    Raises:
        InputError: the corpus that is set does not read a path, or the files are of no kind or of several.
    """
    given = {match[1]: match[2] for word in overrides if (match := re.match(r"--config\.data\.(\w+)=(.+)", word))}
    if "corpus" in given:
        path, kind = given.get("path"), CORPORA.get(config.data.corpus)
        if path and kind and not kind.reads_path:
            raise InputError(
                f"data.corpus={config.data.corpus} does not read data.path: leave data.corpus out, and the files at "
                "the path say what it is"
            )
        return
    kind = CORPORA.get(config.data.corpus)
    if not kind or kind.reads_path or not ({"path", "name"} & given.keys()):
        return
    config.data.corpus = corpus_of_path(given["path"]) if "path" in given else "hf"
    fit_pack(config)


def corpus_of_path(path: str) -> str:
    """The name of the corpus that reads the files at a path: a file, a folder or a glob.

    >>> corpus_of_path("text")
    'text'

    Raises:
        InputError: nothing is there, or the files are of no kind that is known, or of several.
    """
    endings = {ending: name for name, kind in CORPORA.items() for ending in kind.endings}
    files = _names(path)
    counts = Counter(name for file in files if (name := _kind(file, endings)))
    if len(counts) == 1:
        return next(iter(counts))
    if len(counts) > 1:
        found = " and ".join(f"{count} of data.corpus={name}" for name, count in counts.items())
        raise InputError(f"data.path={path} has files of several kinds, {found}: choose one with --config.data.corpus")
    if len(files) == 1:  # a file of any other name is a text
        return "text"
    if not files:
        raise InputError(f"data.path={path}: there is nothing: give a file, a folder or a glob")
    raise InputError(
        f"data.path={path}: no file ends in {', '.join(endings)}: if they are texts, add --config.data.corpus=text and "
        "give a glob, such as --config.data.path='notes/*.md'"
    )


def _names(path: str) -> list[str]:
    """The names of a path's files."""
    if not is_remote(path):
        return [file.path for file in find_files(path)]
    place = reach(path)
    return [child.name for child in place.iterdir()] if place.is_dir() else [place.name]


def _kind(file: str, endings: dict[str, str]) -> str | None:
    return next((name for ending, name in endings.items() if file.endswith(ending)), None)
