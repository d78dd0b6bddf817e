"""Attention over pairs, and the quadratic mixers: multi-head softmax attention and FLASH-Quad's unit."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oracles.attention_functions import weights
from oracles.positions import rope


class Row(NamedTuple):
    """What a mixer knows of the tokens of one row: who sees whom, and the position of each in its document."""

    sees: Callable[[int, int], bool]
    positions: list[int]


def attend(q_LxK, k_LxK, v_LxE, sees, *, function, factor, divisor, bias) -> np.ndarray:
    """Σ_u f(factor · q_t·k_u + bias(t, u)) / N · v_u over the keys u that t sees; divisor(number of them) = N."""
    out_LxE = np.zeros((len(q_LxK), v_LxE.shape[1]))
    for t, q_K in enumerate(q_LxK):
        keys = [u for u in range(len(k_LxK)) if sees(t, u)]
        if not keys:
            continue
        scores = [factor * (q_K @ k_LxK[u]) + bias(t, u) for u in keys]
        for u, weight in zip(keys, weights(function, scores, divisor(len(keys))), strict=True):
            out_LxE[t] += weight * v_LxE[u]
    return out_LxE


def pairs_where(joined: Callable[[int, int], bool], length: int) -> np.ndarray:
    """L×L of bool."""
    return np.array([[joined(t, u) for u in range(length)] for t in range(length)])


def silu(x: np.ndarray) -> np.ndarray:
    """x σ(x)."""
    return x / (1 + np.exp(-x))


def rotated(x_LxK: np.ndarray, row: Row, settings) -> np.ndarray:
    """Rotary positions, where the model has them."""
    if not settings.rotary:
        return x_LxK
    base = settings.rotary_base
    return np.stack([rope(x_K, position, base) for x_K, position in zip(x_LxK, row.positions, strict=True)])


def heads(x_LxD: np.ndarray, count: int) -> list[np.ndarray]:
    """The columns of each head."""
    width = x_LxD.shape[1] // count
    return [x_LxD[:, h * width : (h + 1) * width] for h in range(count)]
