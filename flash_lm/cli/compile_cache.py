"""JAX's persistent compilation cache: the second run of a command does not compile again."""

import logging
import os

import jax

_log = logging.getLogger(__name__)

FOLDER = os.path.join("~", ".cache", "flash_lm", "compiled")
_WORTH_SECONDS = 0.1  # compile time below which reading the cache takes as long


def keep_compiled() -> None:
    """Lets JAX save what it compiles, and load it when it needs the same program again.

    JAX's key contains the program, the options, the versions and a CPU's features, so machines may share a folder:
    none loads code that it cannot run. JAX_COMPILATION_CACHE_DIR and limits of the user are kept.
    """
    # A folder that the user has set is kept.
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = os.path.expanduser(FOLDER)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        _log.info("compiled programs are not cached: %s: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_SECONDS)


def compile_without_cache() -> None:
    """Disables the cache, including one that the user has set."""
    jax.config.update("jax_enable_compilation_cache", False)
