"""A checksum of arrays: every flipped bit changes it, and it is the same on every mesh."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

# Two pairs of odd multipliers, one pair for each of the two sums.
_MULTIPLIERS = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(tree: Any) -> str:
    """Checksum of a pytree of arrays, as sixteen hexadecimal digits.

    Changing one number always changes it; other damage goes unnoticed in about one case in 2⁶⁴. It depends on the
    arrays' names, shapes and bits. It does not depend on their sharding, because the sums are of integers.

    >>> fingerprint({"x": jnp.zeros(3)}) == fingerprint({"y": jnp.zeros(3)})
    False

    Args:
        tree: pytree of arrays with at most 4 bytes per number.
    """
    return "".join(f"{int(word):08x}" for word in jax.device_get(_checksum_words(tree)))


@jax.jit
def _checksum_words(tree: Any) -> jax.Array:
    """The two 32-bit sums of a tree; each array counts with a factor that depends on its name and shape."""
    total = jnp.zeros(len(_MULTIPLIERS), jnp.uint32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = zlib.crc32(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode()) | 1
        total += jnp.uint32(name) * _leaf_sums(leaf)
    return total


def _leaf_sums(x: jax.Array) -> jax.Array:
    """Sums, modulo 2³², of a hash of each number's bits and index.

    For each index the hash is one-to-one, so a change of one number always changes both sums.
    """
    words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    index, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):  # axis by axis, to avoid reshapes across devices
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    # Xor and multiplication by an odd number are one-to-one modulo 2³², and so are the shifts with xor.
    sums = []
    for first, second in _MULTIPLIERS:
        mixed = (words ^ (index * jnp.uint32(second))) * jnp.uint32(first)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(second)
        sums.append((mixed ^ (mixed >> 13)).sum(dtype=jnp.uint32))
    return jnp.stack(sums)
