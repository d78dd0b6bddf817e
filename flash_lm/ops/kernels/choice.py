"""Whether a part of a model runs through a kernel: `model.kernels`, the machine and the shape decide."""

import functools
import logging

import jax

from flash_lm.ops.attention_functions import ELEMENTWISE

_log = logging.getLogger(__name__)

_OF_PLATFORM = {"gpu": "triton", "tpu": "mosaic"}
_SMALLEST = 128  # queries of a chunk: below, a tile is mostly padding
_NARROWEST = 64  # queries and values likewise
_WIDEST = 256  # bytes of a query that leave room for the rest in a GPU's shared memory


def choose(requested: str, part: str, function: str, size: int, q: jax.Array, v: jax.Array) -> str | None:
    """The backend of a part of a model, logged once.

    Args:
        requested: `model.kernels`: "auto", "xla" or "pallas", which a CPU interprets.
        part: its name, for the log.
        function: of the scores.
        size: queries of a chunk.
        q: queries, …×K.
        v: values, …×E.

    Returns:
        A name of `BACKENDS`, or None for the form that XLA compiles.
    """
    platform, key_width, value_width = jax.default_backend(), q.shape[-1], v.shape[-1]
    if function not in ELEMENTWISE:
        backend, why = None, f"{function} has no kernel"
    elif requested == "xla":
        backend, why = None, "model.kernels=xla"
    elif requested == "pallas":
        backend, why = _OF_PLATFORM.get(platform, "interpreted"), "model.kernels=pallas"
    elif platform not in _OF_PLATFORM:
        backend, why = None, f"{platform} has no kernels"
    elif size < _SMALLEST or key_width % _NARROWEST or value_width % _NARROWEST:
        backend, why = None, f"{size} queries of {key_width} and values of {value_width} would be mostly padding"
    elif key_width * q.dtype.itemsize > _WIDEST:
        backend, why = None, f"queries of {key_width} in {q.dtype.name} are too wide"
    else:
        backend, why = _OF_PLATFORM[platform], f"model.kernels=auto on {platform}"
    _say(f"{part}: {f'Pallas kernel ({backend})' if backend else 'compiled by XLA'}, {why}")
    return backend


@functools.cache
def _say(line: str) -> None:
    _log.info(line)
