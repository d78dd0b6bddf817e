"""The files that `data.path` names: each real file once, with the split that its name says."""

import dataclasses
import functools
import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flash_lm.config.addresses import is_remote
from flash_lm.config.data import DataConfig
from flash_lm.errors import InputError
from flash_lm.runs.local_copy import fetch

_log = logging.getLogger(__name__)
# As the `datasets` library reads names, but for words between spaces: "The Night Train.txt" is a title.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in _WORDS.items() for word in words}
_SEPARATORS = re.compile(r"[-._0-9]+")


def with_local_files(config: DataConfig) -> DataConfig:
    """A config whose data.path lies on this machine: what lies in an object store is copied first.

    Raises:
        InputError: it cannot be read, or nothing is there.
    """
    if not config.path or not is_remote(config.path):
        return config
    local = str(fetch(config.path, or_glob=True))
    if not os.path.exists(local) and not glob.glob(local, recursive=True):
        raise InputError(f"no object matches data.path={config.path}: give a file, a folder or a glob")
    return dataclasses.replace(config, path=local)


class DataFile(NamedTuple):
    """A file of a corpus.

    Attributes:
        path: where it lies.
        split: train, validation or test.
    """

    path: str
    split: str = "train"


def find_files(path: str, endings: Sequence[str] = ()) -> list[DataFile]:
    """The files of a path, in the order of their paths, each with the split that its name says, see `split_name`.

    A path that exists is that file or folder; any other is a glob, in which `**` goes through folders of any depth.
    Hidden files and folders need to be named. Links are followed; a file that several paths lead to is read once. Files
    whose names say no split are for training if no name says so, and left out otherwise. A glob all of whose files are
    of one split is taken to mean them, whatever the split.

    Args:
        path: a file, folder or glob.
        endings: of the files of a folder, such as .txt; none: all of them.

    Raises:
        InputError: names say that the same file belongs to different splits, or most files would be left out.
    """
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return [DataFile(path)]
    # A folder stands for all files below it; a glob is matched from the deepest folder that it names literally.
    is_folder = os.path.isdir(path)
    root, parts = (path, ("**", "*")) if is_folder else _literal_root(path)
    paths = sorted(file for file in _walk(root, parts) if os.path.isfile(file))
    if is_folder and endings:
        paths = [file for file in paths if file.endswith(tuple(endings))]
    files = _unique_files([(file, split_name(os.path.relpath(file, root or "."))) for file in paths])
    # Decide on the files whose names say no split.
    named = {split for _, split in files}
    if not is_folder and len(named) == 1:
        return [DataFile(file) for file, _ in files]
    if {"train", None} <= named:
        unnamed = [file for file, split in files if split is None]
        named_train = [file for file, split in files if split == "train"]
        if len(unnamed) > len(named_train):
            raise InputError(
                f"{len(unnamed)} files, such as {unnamed[0]}, would be left out, since names such as {named_train[0]} "
                "say which ones are for training: rename these, or give a glob of the files that you mean"
            )
        warn_once(f"files whose names say no split are left out: {len(unnamed)}, such as {unnamed[0]}")
        files = [(file, split) for file, split in files if split]
    return [DataFile(file, split or "train") for file, split in files]


def split_name(path: str) -> str | None:
    """The split that a relative path says, in its file's name or a folder's.

    A name that is one of the words (train.txt, test/) comes before one that has it as a part (wiki.train.txt), and the
    file's name before that of its folder.
    """
    names = path.lower().split(os.sep)[::-1]
    splits = [_SPLIT_OF_WORD.get(name) for name in (names[0].split(".")[0], *names[1:])]
    parts = [_SPLIT_OF_WORD.get(word) for name in names for word in _SEPARATORS.split(name)]
    return next((split for split in (*splits, *parts) if split), None)


@functools.cache
def warn_once(line: str) -> None:
    """Logs a line once: a corpus is looked up several times."""
    _log.warning("%s", line)


def _unique_files(files: list[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Leaves out further paths to a file, whether by symbolic or by hard links; the path that says a split is kept."""
    # Links to the same file count once, also under other names.
    by_inode: dict[tuple[int, int], tuple[str, str | None]] = {}
    for path, split in files:
        status = os.stat(path)
        first, its_split = by_inode.setdefault((status.st_dev, status.st_ino), (path, split))
        if split and its_split and split != its_split:
            raise InputError(
                f"{first} and {path} are the same file, named as {its_split} and as {split}: remove one of them"
            )
        if split and not its_split:
            by_inode[status.st_dev, status.st_ino] = path, split
    return sorted(by_inode.values())


def _literal_root(path: str) -> tuple[str, tuple[str, ...]]:
    """The folder that a glob begins with, and the patterns below it; a folder that exists is no pattern."""
    parts = path.split(os.sep)
    for i in range(len(parts), 0, -1):
        root = os.sep.join(parts[:i]) or os.sep
        if os.path.isdir(root):
            return root, tuple(parts[i:])
    return "", tuple(parts)


def _walk(folder: str, parts: Sequence[str]) -> Iterator[str]:
    """The paths below a folder that match patterns, one for each part of a path."""
    if not parts:
        yield folder
        return
    # ** stands for any number of folders; other patterns for one name each.
    first, rest = parts[0], parts[1:]
    if first == "**":
        for below in _folders(folder):
            yield from _walk(below, rest or ("*",))
    elif not glob.has_magic(first):
        if os.path.lexists(path := os.path.join(folder, first)):
            yield from _walk(path, rest)
    else:
        for path in glob.iglob(os.path.join(glob.escape(folder), first)):
            if not rest or os.path.isdir(path):
                yield from _walk(path, rest)


def _folders(root: str) -> Iterator[str]:
    """A folder and all below it.

    Links are followed, but for those that lead up again. A real folder is entered once for each split that its path
    says, so that any cycle of links ends and no file loses its split.
    """
    # Links to folders are followed, but not in circles, and no folder is entered twice for a split.
    entered = set()
    for folder, below, _ in os.walk(root or ".", followlinks=True):
        relative, real = os.path.relpath(folder, root or "."), os.path.realpath(folder)
        where = real, split_name(os.path.join(relative, "_"))
        if where in entered:
            below.clear()
            continue
        entered.add(where)
        leads_up = lambda name, folder=folder, real=real: os.path.join(real, "").startswith(
            os.path.join(os.path.realpath(os.path.join(folder, name)), "")
        )
        below[:] = sorted(name for name in below if not name.startswith(".") and not leads_up(name))
        yield folder if root else relative
