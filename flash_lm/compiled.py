"""JAX's own cache of compiled programs, on the disk: the second run of a command need not compile again."""

import logging
import os

import jax

_log = logging.getLogger(__name__)

FOLDER = os.path.join("~", ".cache", "flash_lm", "compiled")
_WORTH_SECONDS = 0.1  # of compilation; what is quicker takes as long to read


def keep_compiled() -> None:
    """Has JAX keep what it compiles, and take from there what is the same program.

    JAX's key has the program, the options, the versions, and of a CPU its features: a folder that several machines
    share brings no code that one of them cannot run. A user's own JAX_COMPILATION_CACHE_DIR and limits stay.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = os.path.expanduser(FOLDER)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        _log.info("compiled programs are not kept: %s: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_SECONDS)


def compile_anew() -> None:
    """Neither takes nor keeps anything, wherever the user's own cache may be."""
    jax.config.update("jax_enable_compilation_cache", False)
