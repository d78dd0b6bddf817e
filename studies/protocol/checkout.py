"""A checkout of a commit with an environment of its own, so that work in the tree does not touch what runs there."""

import os
import pathlib
import shutil
import subprocess
import sys

from flash_lm.errors import InputError, RunError, first_line

DIGITS = 12  # of a commit's name


def git(tree: pathlib.Path, *words: str) -> str:
    """What git prints.

    Raises:
        InputError: git fails; the message is its own.
    """
    done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"git {' '.join(words)} in {tree}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip()


def commit_of(tree: pathlib.Path, name: str) -> str:
    """The first digits of a commit, such as of HEAD or of a branch."""
    return git(tree, "rev-parse", "--verify", f"{name}^{{commit}}")[:DIGITS]


def checkout(tree: pathlib.Path, commit: str, folder: pathlib.Path) -> pathlib.Path:
    """A clone of the tree at a commit, in FOLDER/COMMIT; it is made once, without the network.

    Its environment .venv is a copy of the one that this process has. Files are linked, not copied, where the disk
    allows it; an installer replaces files, so it changes one environment alone.

    Raises:
        InputError: there is no such commit, this Python is of no environment, or the checkout was changed by hand.
        RunError: it cannot be made.
    """
    place = folder / commit
    if place.exists():
        if git(place, "status", "--porcelain", "--untracked-files=no") or commit_of(place, "HEAD") != commit:
            raise InputError(f"{place} is no longer {commit} as it was committed: remove it, and it is made again")
        return place
    if sys.prefix == sys.base_prefix:
        raise InputError(f"{sys.executable} is of no environment that could be copied: use .venv/bin/python")
    partial = folder / f"{commit}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        git(folder, "clone", "--quiet", "--no-checkout", str(tree), str(partial))
        git(partial, "checkout", "--quiet", "--detach", commit)
        shutil.copytree(sys.prefix, partial / ".venv", symlinks=True, copy_function=_linked)
        for hook in (partial / ".venv").glob("lib/python*/site-packages/__editable__*"):
            hook.unlink()  # leads to the tree
        try:
            os.replace(partial, place)
        except OSError:
            if not place.exists():  # else another process was faster
                raise
    except (OSError, shutil.Error) as error:
        raise RunError(f"the environment {sys.prefix} cannot be copied to {partial}: {first_line(error)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def _linked(file: str, copy: str) -> None:
    """A hard link to a file, or a copy on another disk."""
    try:
        os.link(file, copy)
    except OSError:
        shutil.copy2(file, copy)


def python_of(place: pathlib.Path) -> pathlib.Path:
    """The interpreter of a checkout's environment."""
    return place / ".venv" / "bin" / "python"
