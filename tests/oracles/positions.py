"""Rotary and absolute positions, relative biases."""

import math
from collections.abc import Callable

import numpy as np

BASE = 10000
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128


def rope(x_K: np.ndarray, position: int, base: float = BASE) -> np.ndarray:
    """Rotates the plane of dimensions i and i + K/2 by position · base^(−2i/K)."""
    half = len(x_K) // 2
    rotated = np.zeros_like(x_K)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x_K))
        rotated[i] = x_K[i] * math.cos(angle) - x_K[i + half] * math.sin(angle)
        rotated[i + half] = x_K[i] * math.sin(angle) + x_K[i + half] * math.cos(angle)
    return rotated


def sinusoid(position: int, width: int) -> np.ndarray:
    """Sines in the first half, cosines in the second."""
    angles = [position * BASE ** (-2 * i / width) for i in range(width // 2)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def absolute_position(name: str, position: int, width: int, p: dict) -> np.ndarray:
    """Returns the vector that is added to the embedding of the token at `position`."""
    if name == "none":
        return np.zeros(width)
    if name == "learned":
        return p["table"][position]
    return sinusoid(position, width) * (p["scale"] if name == "scaled_sinusoid" else 1)


def t5_bucket(distance: int, causal: bool, buckets: int = T5_BUCKETS, max_distance: int = T5_MAX_DISTANCE) -> int:
    """Returns T5's bucket of `distance` = position of the key − position of the query.

    The border of a logarithmic bucket is irrational for most buckets and an integer for some, so it is compared in
    integers: exact · (max / exact)^(k / n) ≤ back is exact^n · max^k ≤ back^n · exact^k.
    """
    first = 0
    if not causal:
        buckets //= 2
        first = buckets if distance > 0 else 0
    back = abs(distance) if not causal else max(-distance, 0)
    exact = buckets // 2
    if back < exact:
        return first + back
    steps = buckets - exact
    k = 0
    while k + 1 < steps and exact**steps * max_distance ** (k + 1) <= back**steps * exact ** (k + 1):
        k += 1
    return first + exact + k


def relative_bias(name: str, reach: int, causal: bool, p: dict | None) -> Callable[[int, int], float]:
    """Returns the function bias(t, u) of query t and key u.

    Args:
        name: none, toeplitz, t5 or rope.
        reach: for toeplitz, whose w has 2 · reach − 1 entries; the middle one is distance 0.
        causal: whether all of T5's buckets are for earlier keys.
        p: parameters of the bias.
    """
    if name == "toeplitz":
        return lambda t, u: p["weight"][u - t + reach - 1]
    if name == "t5":
        return lambda t, u: p["weight"][t5_bucket(u - t, causal)]
    if name == "rope":
        return lambda t, u: rope(p["query"], t) @ rope(p["key"], u)
    return lambda t, u: 0.0
