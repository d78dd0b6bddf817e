"""Retention pair by pair (Sun et al. 2023, eq. 5–8): the weight of a key is q·k / √K times γ^distance."""

import math

import numpy as np

from oracles.attention import Row, heads, rotated, silu
from oracles.convolution import mapped


def retention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(silu(x W_g) ⊙ concat(norm(head_h))) W_o; a head is divided by its root mean square."""
    q, k, v = (heads(mapped(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value"))
    outs = []
    for h in range(settings.num_heads):
        gamma = 1 - 2 ** -(settings.retention.decay_base + h)
        queries, keys = (rotated(x[h], row, settings) for x in (q, k))
        out = np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            for u in range(len(x_LxD)):
                if row.sees(t, u):
                    out[t] += gamma ** abs(t - u) * (queries[t] @ keys[u]) / math.sqrt(keys.shape[1]) * v[h][u]
        outs.append(out / np.sqrt((out**2).mean(axis=1, keepdims=True) + 1e-6))
    return (silu(x_LxD @ p["gate"]["kernel"]) * np.concatenate(outs, axis=1)) @ p["output"]["kernel"]
