"""Multi-head softmax attention ("Attention Is All You Need", section 3.2)."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, attend, split_heads
from oracles.convolution import project
from oracles.feed_forward import GLU, MLP
from oracles.row import Family, Sublayer


def softmax_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, head_h = softmax(q kᵀ / √K) v, where groups of query heads may share k and v."""
    q = split_heads(project(x_LxD, p, "query", row, settings), settings.num_heads)
    k, v = (split_heads(project(x_LxD, p, name, row, settings), settings.num_kv_heads) for name in ("key", "value"))
    outs = []
    for h in range(settings.num_heads):
        shared = h * settings.num_kv_heads // settings.num_heads  # head of keys and values
        outs.append(
            attend(
                apply_rotary(q[h], row, settings),
                apply_rotary(k[shared], row, settings),
                v[shared],
                row.sees,
                function="softmax",
                factor=1 / math.sqrt(q[h].shape[1]),
                divisor=lambda visible: 1,
                bias=lambda t, u: 0.0,
            )
        )
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def softmax_maps(s: SimpleNamespace) -> int:
    """Parameters of the maps of queries and outputs, and of keys and values, which heads may share."""
    return 2 * s.model_dim**2 + 2 * s.model_dim**2 // s.num_heads * s.num_kv_heads


SOFTMAX = Sublayer(
    softmax_attention,
    softmax_maps,
    lambda s, length: 2 * length * softmax_maps(s) + 2 * len(counting.visible_pairs(s, length)) * 2 * s.model_dim,
    lambda s: s.model_dim + 2 * s.model_dim // s.num_heads * s.num_kv_heads,
)
ROWS = {
    "transformer": Family((SOFTMAX, MLP), absolute="learned", like="transformer_plus_plus", serves_prefix=True),
    "transformer_plus": Family((SOFTMAX, MLP), rotary=True, like="transformer_plus_plus", serves_prefix=True),
    "transformer_plus_plus": Family((SOFTMAX, GLU), rotary=True, both_ways=True, serves_prefix=True, growth="memory"),
}
