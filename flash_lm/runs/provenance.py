"""The provenance that every measured or scored line records: device, versions and commit."""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Collection
from typing import Any

from flash_lm.errors import InputError

_PACKAGES = ("jax", "flax")


def provenance(device_kind: str) -> dict[str, Any]:
    """The device, the versions, the code's commit, and whether the code has uncommitted changes (None: no repository).

    Args:
        device_kind: JAX's name for it; for a CPU it is `cpu_name()` instead.
    """
    # Packages that are not installed are left out; outside of a repository, git answers nothing.
    versions = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short=12", "HEAD")
    # Results are no code: a run that writes two files is not dirty at the second.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude,glob)**/results/**")
    return {
        "device": cpu_name() if device_kind == "cpu" else device_kind,
        "versions": ", ".join(versions),
        "git": commit,
        "dirty": None if changed is None else bool(changed),
    }


def merge_provenance(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Merges the provenance of two sessions that made something: the values of both; dirty if either was."""
    both = {key: _both(before.get(key), now[key]) for key in now}
    return both | {"dirty": before.get("dirty") or now["dirty"]}


def _both(before: Any, now: Any) -> str | None:
    """Adds a value to those of earlier sessions, if it is not among them."""
    if not (before and now) or f", {now}," in f", {before},":
        return str(before or now) if before or now else None
    return f"{before}, {now}"


def config_hash(config: Any) -> str:
    """A hash of twelve digits, the same for equal configs; `config` must be serializable as JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def hash_of_files(folder: pathlib.Path, suffixes: Collection[str]) -> str:
    """A hash of twelve digits of the contents of all files with these suffixes in a folder and its subfolders.

    Raises:
        InputError: no such file exists.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    if not files:
        raise InputError(f"{folder} has no file that ends in {' or '.join(suffixes)}: give a folder of data")
    digests = [hashlib.sha256(path.read_bytes()).digest() for path in files]
    return hashlib.sha256(b"".join(digests)).hexdigest()[:12]


def _git(*words: str) -> str | None:
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_name() -> str:
    """The CPU's model and the threads that this process may use: what pins it to fewer cores also makes XLA use fewer.

    The model is its name in Linux, else the one that Python knows.
    """
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    model = match[1] if match else platform.processor() or platform.machine()
    return f"{model}, {cpu_threads()} threads"


def cpu_threads() -> int:
    """The threads that this process may use; where the system has no affinity, all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
