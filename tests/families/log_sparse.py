"""LogSparse attention: visible offsets (definitions 3 and 4 of the paper) and softmax over them."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, attend, pair_matrix, split_heads
from oracles.convolution import convolve, normalise_heads, project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def is_visible_offset(settings: SimpleNamespace, t: int, u: int) -> bool:
    """Whether the pattern includes key u for query t; the bidirectional pattern is symmetric."""
    local, restart, back = settings.log_sparse.local, settings.log_sparse.restart, abs(t - u)
    back = back % restart if restart else back
    further = back - (local - 1)  # distance from the last local token
    return further <= 0 or math.log2(further).is_integer()


def log_sparse_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether input u affects output t, as key or value, or through the convolution of the query or of a key."""
    del p
    taps = settings.short_convolution
    past_taps = taps - 1 if settings.causal else taps // 2

    def reads(center: int, u: int) -> bool:
        return u == center or (taps > 0 and -past_taps <= u - center < taps - past_taps and row.sees(center, u))

    def connected(t: int, u: int) -> bool:
        keys = (w for w in range(len(x_LxD)) if row.sees(t, w) and is_visible_offset(settings, t, w))
        return row.sees(t, u) and (reads(t, u) or any(reads(w, u) for w in keys))

    return pair_matrix(connected, len(x_LxD))


def log_sparse_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, with queries and keys by depthwise or full convolutions."""

    def project_heads(name: str) -> list[np.ndarray]:
        if settings.log_sparse.convolution != "full" or name == "value":
            return split_heads(project(x_LxD, p, name, row, settings), settings.num_heads)
        y = convolve(x_LxD, p["convolutions"][name], row.sees, settings.causal)
        return split_heads(normalise_heads(y, p, name, settings), settings.num_heads)

    outs = [
        attend(
            *(apply_rotary(x, row, settings) for x in (q, k)),
            v,
            lambda t, u: row.sees(t, u) and is_visible_offset(settings, t, u),
            function="softmax",
            factor=1 / math.sqrt(q.shape[1]),
            divisor=lambda visible: 1,
            bias=lambda t, u: 0.0,
        )
        for q, k, v in zip(*(project_heads(name) for name in ("query", "key", "value")), strict=True)
    ]
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _maps(s: SimpleNamespace) -> int:
    return (2 if s.log_sparse.convolution == "full" else 4) * s.model_dim**2


LOG_SPARSE = Sublayer(
    log_sparse_attention,
    _maps,
    lambda s, length: (
        2 * length * _maps(s)
        + 2 * sum(is_visible_offset(s, t, u) for t, u in counting.visible_pairs(s, length)) * 2 * s.model_dim
    ),
    # Weights per tap: D² with full filters, D with depthwise ones.
    lambda s: 2 * s.model_dim * (s.model_dim if s.log_sparse.convolution == "full" else 1),
)
ROWS = {
    "log_sparse": Family(
        (LOG_SPARSE, MLP),
        absolute="learned",
        defaults={"short_convolution": 3},
        small={"log_sparse.local": 3},
        xla_keys={"model_dim": 1024},  # convolutions have many elementwise operations
        connects=log_sparse_pairs,
    )
}
