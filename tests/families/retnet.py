"""Retention pair by pair (Sun et al. 2023, eq. 5–8): the weight of a key is q·k / √K times γ^distance."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, silu, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def retention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(silu(x W_g) ⊙ concat(norm(head_h))) W_o; each head's output is divided by its root mean square."""
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    outs = []
    for h in range(settings.num_heads):
        gamma = 1 - 2 ** -(settings.retention.decay_base + h)
        queries, keys = (apply_rotary(x[h], row, settings) for x in (q, k))
        out = np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            for u in range(len(x_LxD)):
                if row.sees(t, u):
                    out[t] += gamma ** abs(t - u) * (queries[t] @ keys[u]) / math.sqrt(keys.shape[1]) * v[h][u]
        outs.append(out / np.sqrt((out**2).mean(axis=1, keepdims=True) + 1e-6))
    return (silu(x_LxD @ p["gate"]["kernel"]) * np.concatenate(outs, axis=1)) @ p["output"]["kernel"]


def _maps(s: SimpleNamespace) -> int:
    return (2 + 3 * s.retention.value_expand) * s.model_dim**2


def _flops(s: SimpleNamespace, length: int) -> int:
    """The bidirectional form has sums from both sides."""
    d, size = s.model_dim, s.linear.chunk_size
    width, values = d // s.num_heads, s.retention.value_expand * d // s.num_heads
    across = sum(counting.count_chunk_terms(length, size)[1:])
    inside = sum(t // size == u // size for t, u in counting.visible_pairs(s, length))
    sums = inside * (width + values) + across * width * values * (1 if s.causal else 2)
    return 2 * length * _maps(s) + 2 * s.num_heads * sums


RETENTION = Sublayer(retention, _maps, _flops, lambda s: (2 + s.retention.value_expand) * s.model_dim)
ROWS = {
    "retnet": Family(
        (RETENTION, MLP),
        rotary=True,
        defaults={"mlp_dim": lambda s: 2 * s.model_dim},
        # The sums of the first and last chunk are computed but not read; with narrow heads they matter less.
        xla_keys={"model_dim": 512, "num_heads": 16, "linear.chunk_size": 64},
        kernels=(True,),
        constant_state=True,
        decays=True,
        recomputes_products=True,
        normed_heads=True,
    )
}
