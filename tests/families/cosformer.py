"""cosFormer pair by pair (Qin et al. 2022, eq. 9): the weight of a key is relu(q)·relu(k) cos(π/2 · distance / M)."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def cosine_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o; a query whose weights are all zero gets zero."""
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    outs = []
    for h in range(settings.num_heads):
        queries, keys = ([relu(y) for y in apply_rotary(x[h], row, settings)] for x in (q, k))
        out = np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            total = 0.0
            for u in range(len(x_LxD)):
                if row.sees(t, u):
                    distance = row.positions[t] - row.positions[u]
                    weight = queries[t] @ keys[u] * math.cos(math.pi / 2 * distance / settings.cosformer.cos_length)
                    out[t] += weight * v[h][u]
                    total += weight
            out[t] /= total if total > 0 else 1
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def relu(x: np.ndarray) -> np.ndarray:
    """max(x, 0)."""
    return np.array([max(x_i, 0.0) for x_i in x])


def _flops(s: SimpleNamespace, length: int) -> int:
    """Features are twice as wide; the denominator counts as one more value."""
    width = s.model_dim // s.num_heads
    return 2 * length * 4 * s.model_dim**2 + 2 * s.num_heads * counting.linear_sums(s, length, 2 * width, width + 1)


COSINE = Sublayer(cosine_attention, lambda s: 4 * s.model_dim**2, _flops, lambda s: 3 * s.model_dim)
ROWS = {
    "cosformer": Family(
        (COSINE, MLP),
        absolute="learned",
        defaults={"cosformer.cos_length": lambda s: s.max_length},
        kernels=(True,),
        constant_state=True,
        limits_length=True,
        one_pass=True,
        growth="linear",
        # In heads of four channels relu leaves some queries with almost no weight. Their gradients are divided by it
        # and consist of rounding: on one device other chunks change the gradient norm by 1e-5.
        mesh={"model_dim": 32, "num_heads": 2, "mlp_dim": 64},
    )
}
