"""Restarts a command with huge pages for glibc's large arrays: see docs/performance.md."""

import logging
import os
import pathlib
import sys

_log = logging.getLogger(__name__)
_THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The second variable marks the first as ours, not the user's.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "FLASH_LM_HUGE_PAGES": "1"}
_DEBUGGERS = ("pdb", "debugpy", "pydevd")  # modules: a debugger may be loaded before it traces anything


def use_huge_pages() -> None:
    """Restarts the process with glibc's large arrays on huge pages, if the system leaves that choice to the process.

    XLA's CPU backend allocates gigabytes again for each step. glibc reads its settings only when a process starts.
    Settings of the user stay as they are, and a debugger or profiler would lose the process.
    """
    chosen = any(name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ)
    if chosen or not _THP.is_file() or "[madvise]" not in _THP.read_text():
        return
    # execv replaces the process, and with it a debugger in it.
    if watcher := watched_by():
        _log.info("not restarted with huge pages, because %s watches the process: steps on a CPU take longer", watcher)
        return
    os.environ.update(_HUGE_PAGES)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def watched_by() -> str | None:
    """The debugger, profiler or coverage tool that runs inside this process; None: none of them does."""
    if debugger := next((name for name in _DEBUGGERS if name in sys.modules), None):
        return debugger
    if sys.gettrace() is not None:
        return "a debugger (sys.settrace)"
    if sys.getprofile() is not None:
        return "a profiler (sys.setprofile)"
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = (monitoring.get_tool(number) for number in range(6)) if monitoring else ()
    return next(filter(None, tools), None)


def user_environment() -> dict[str, str]:
    """The environment without the variables that `use_huge_pages` added."""
    ours = _HUGE_PAGES.items() if "FLASH_LM_HUGE_PAGES" in os.environ else ()
    return {name: value for name, value in os.environ.items() if (name, value) not in ours}
