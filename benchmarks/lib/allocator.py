"""One allocator for both sides of a comparison on a CPU: glibc keeps freed memory, and uses huge pages."""

import os
import sys
from collections.abc import Mapping

from flash_lm.cli.huge_pages import user_environment

# Else a step's arrays of gigabytes are returned to the system and come back page by page in the next step, which costs
# PyTorch more than XLA. One arena: memory that one thread freed is there for the others.
_KEPT = ("hugetlb=1", "arena_max=1", f"mmap_threshold={2**32}", f"trim_threshold={2**34}")
SETTINGS = {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _KEPT)}


def keep_memory() -> None:
    """Restarts this process with an allocator that keeps memory; the processes that it starts have the same one.

    glibc reads its settings only when a process starts. Settings of the user stay as they are, for both sides.
    """
    if not chosen_settings(user := user_environment()):
        os.environ.clear()
        os.environ.update(user | SETTINGS)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def chosen_settings(environment: Mapping[str, str]) -> str:
    """Returns the settings of glibc's allocator in an environment, in the order of their names.

    >>> chosen_settings({"MALLOC_ARENA_MAX": "1", "PATH": "/bin", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    'GLIBC_TUNABLES=glibc.malloc.hugetlb=1 MALLOC_ARENA_MAX=1'
    """
    names = sorted(name for name in environment if name.startswith(("GLIBC_TUNABLES", "MALLOC_")))
    return " ".join(f"{name}={environment[name]}" for name in names)
