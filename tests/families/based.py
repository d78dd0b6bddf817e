"""Based's linear attention pair by pair (Arora et al. 2024, section 4.1): the weight of a key is 1 + s + s²/2."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, split_heads
from oracles.convolution import project
from oracles.feed_forward import GLU
from oracles.row import Family, Sublayer


def taylor_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, with s = q·k / √K; a token that sees nothing gets zero."""
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    outs = []
    for h in range(settings.num_heads):
        queries, keys = (apply_rotary(x[h], row, settings) for x in (q, k))
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


def _maps(s: SimpleNamespace) -> int:
    return 2 * s.model_dim**2 + 2 * s.model_dim * s.num_heads * s.based.feature_dim


def _flops(s: SimpleNamespace, length: int) -> int:
    """Features: 1, the inputs, their squares, and products of two; the denominator counts as one more value."""
    features = 1 + 2 * s.based.feature_dim + math.comb(s.based.feature_dim, 2)
    sums = counting.linear_sums(s, length, features, s.model_dim // s.num_heads + 1)
    return 2 * length * _maps(s) + 2 * s.num_heads * sums


TAYLOR = Sublayer(taylor_attention, _maps, _flops, lambda s: 2 * s.num_heads * s.based.feature_dim + s.model_dim)
ROWS = {
    "based": Family(
        (TAYLOR, GLU),
        absolute="learned",
        # The usual GLU's 8/3 D, plus D / 2 for the parameters that narrow queries and keys save.
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(19, 6, s.model_dim)},
        small={"based.feature_dim": 4},
        letters=lambda s: {"A": s.based.feature_dim},
        xla_counts_flops=False,  # it selects pairs of features by matrix products
        constant_state=True,
    )
}
