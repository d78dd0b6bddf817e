"""Based's linear attention pair by pair (Arora et al. 2024, section 4.1): the weight of a key is 1 + s + s²/2."""

import math

import numpy as np

from oracles.attention import Row, heads, rotated
from oracles.convolution import mapped


def taylor_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, with s = q·k / √K; a token that sees nothing gets zero."""
    q, k, v = (heads(mapped(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value"))
    outs = []
    for h in range(settings.num_heads):
        queries, keys = (rotated(x[h], row, settings) for x in (q, k))
        out = np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            total = 0.0
            for u in range(len(x_LxD)):
                if row.sees(t, u):
                    score = queries[t] @ keys[u] / math.sqrt(len(keys[u]))
                    weight = 1 + score + score**2 / 2
                    out[t] += weight * v[h][u]
                    total += weight
            out[t] /= total if total > 0 else 1
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]
