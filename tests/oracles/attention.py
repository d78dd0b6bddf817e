"""Attention pair by pair, and helpers of the quadratic mixers."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oracles.attention_functions import weights
from oracles.positions import rope


class Row(NamedTuple):
    """Context of a mixer for one sequence: which pairs are visible, and each token's position in its document."""

    sees: Callable[[int, int], bool]
    positions: list[int]


def attend(q_LxK, k_LxK, v_LxE, sees, *, function, factor, divisor, bias) -> np.ndarray:
    """Σ_u f(factor · q_t·k_u + bias(t, u)) / N · v_u over the n visible keys u of t; N = divisor(n)."""
    out_LxE = np.zeros((len(q_LxK), v_LxE.shape[1]))
    for t, q_K in enumerate(q_LxK):
        keys = [u for u in range(len(k_LxK)) if sees(t, u)]
        if not keys:
            continue
        scores = [factor * (q_K @ k_LxK[u]) + bias(t, u) for u in keys]
        for u, weight in zip(keys, weights(function, scores, divisor(len(keys))), strict=True):
            out_LxE[t] += weight * v_LxE[u]
    return out_LxE


def pair_matrix(connected: Callable[[int, int], bool], length: int) -> np.ndarray:
    """Returns an L×L mask: whether query t and key u are connected."""
    return np.array([[connected(t, u) for u in range(length)] for t in range(length)])


def silu(x: np.ndarray) -> np.ndarray:
    """x σ(x)."""
    return x / (1 + np.exp(-x))


def apply_rotary(x_LxK: np.ndarray, row: Row, settings) -> np.ndarray:
    """Applies rotary positions if the model uses them."""
    if not settings.rotary:
        return x_LxK
    base = settings.rotary_base
    return np.stack([rope(x_K, position, base) for x_K, position in zip(x_LxK, row.positions, strict=True)])


def split_heads(x_LxD: np.ndarray, count: int) -> list[np.ndarray]:
    """Splits the channels into one array per head."""
    width = x_LxD.shape[1] // count
    return [x_LxD[:, h * width : (h + 1) * width] for h in range(count)]
