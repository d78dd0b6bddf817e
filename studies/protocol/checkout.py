"""Clones a commit with a copy of the environment, so that work in the tree does not disturb its runs."""

import os
import pathlib
import shutil
import subprocess
import sys

from flash_lm.errors import InputError, RunError, first_line

DIGITS = 12  # of a commit's name


def git(tree: pathlib.Path, *words: str) -> str:
    """Runs git in a tree and returns its output.

    Raises:
        InputError: git failed; the message is the last line of git's.
    """
    done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"git {' '.join(words)} in {tree}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip()


def short_commit(tree: pathlib.Path, name: str) -> str:
    """Returns the first digits of a commit's hash; `name` is a revision such as HEAD or a branch."""
    return git(tree, "rev-parse", "--verify", f"{name}^{{commit}}")[:DIGITS]


def checkout(tree: pathlib.Path, commit: str, folder: pathlib.Path) -> pathlib.Path:
    """Clones the tree at a commit into FOLDER/COMMIT, once and without the network, and returns that path.

    The clone's .venv is a copy of the environment of this process. Files are hard links where the disk allows it. An
    installer replaces files, so it changes only one of the two environments.

    Raises:
        InputError: the commit is unknown, this Python is not in an environment, or the checkout was changed by hand.
        RunError: the environment cannot be copied.
    """
    path = folder / commit
    if path.exists():
        if git(path, "status", "--porcelain", "--untracked-files=no") or short_commit(path, "HEAD") != commit:
            raise InputError(f"{path} is no longer {commit} as it was committed: remove it, and it is made again")
        return path
    if sys.prefix == sys.base_prefix:
        raise InputError(f"{sys.executable} is of no environment that could be copied: use .venv/bin/python")
    # Clone and copy under another name, then rename: an interrupted clone never looks complete.
    partial = folder / f"{commit}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        git(folder, "clone", "--quiet", "--no-checkout", str(tree), str(partial))
        git(partial, "checkout", "--quiet", "--detach", commit)
        shutil.copytree(sys.prefix, partial / ".venv", symlinks=True, copy_function=_link_or_copy)
        for hook in (partial / ".venv").glob("lib/python*/site-packages/__editable__*"):
            hook.unlink()  # it would import the package from the tree
        try:
            os.replace(partial, path)
        except OSError:
            if not path.exists():  # otherwise another process was faster
                raise
    except (OSError, shutil.Error) as error:
        raise RunError(f"the environment {sys.prefix} cannot be copied to {partial}: {first_line(error)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def _link_or_copy(file: str, copy: str) -> None:
    """Makes a hard link to a file, or a copy if it is on another disk."""
    try:
        os.link(file, copy)
    except OSError:
        shutil.copy2(file, copy)


def python_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the interpreter of a checkout's environment."""
    return path / ".venv" / "bin" / "python"
