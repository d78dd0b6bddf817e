"""LogSparse attention, from definitions 3 and 4 of the paper: which offsets there are, and softmax over them."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, attend, heads, pairs_where, rotated
from oracles.convolution import by_head, convolve, mapped
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def at_offset(settings: SimpleNamespace, t: int, u: int) -> bool:
    """Whether the pattern has a key at u for the query at t; a bidirectional one is the same on both sides."""
    local, restart, back = settings.log_sparse.local, settings.log_sparse.restart, abs(t - u)
    back = back % restart if restart else back
    further = back - (local - 1)  # from the last of the near tokens
    return further <= 0 or math.log2(further).is_integer()


def log_sparse_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether u's input matters for t: as a key or a value, or in the convolution of the query or of a key."""
    del p
    taps = settings.short_convolution
    own = taps - 1 if settings.causal else taps // 2

    def reads(center: int, u: int) -> bool:
        return u == center or (taps > 0 and -own <= u - center < taps - own and row.sees(center, u))

    def joined(t: int, u: int) -> bool:
        keys = (w for w in range(len(x_LxD)) if row.sees(t, w) and at_offset(settings, t, w))
        return row.sees(t, u) and (reads(t, u) or any(reads(w, u) for w in keys))

    return pairs_where(joined, len(x_LxD))


def log_sparse_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, with queries and keys by depthwise or full convolutions."""

    def of_heads(name: str) -> list[np.ndarray]:
        if settings.log_sparse.convolution != "full" or name == "value":
            return heads(mapped(x_LxD, p, name, row, settings), settings.num_heads)
        y = convolve(x_LxD, p["convolutions"][name], row.sees, settings.causal)
        return heads(by_head(y, p, name, settings), settings.num_heads)

    outs = [
        attend(
            *(rotated(x, row, settings) for x in (q, k)),
            v,
            lambda t, u: row.sees(t, u) and at_offset(settings, t, u),
            function="softmax",
            factor=1 / math.sqrt(q.shape[1]),
            divisor=lambda visible: 1,
            bias=lambda t, u: 0.0,
        )
        for q, k, v in zip(*(of_heads(name) for name in ("query", "key", "value")), strict=True)
    ]
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _maps(s: SimpleNamespace) -> int:
    return (2 if s.log_sparse.convolution == "full" else 4) * s.model_dim**2


LOG_SPARSE = Sublayer(
    log_sparse_attention,
    _maps,
    lambda s, length: (
        2 * length * _maps(s) + 2 * sum(at_offset(s, t, u) for t, u in counting.pairs(s, length)) * 2 * s.model_dim
    ),
    # Of a full filter: weights of one tap.
    lambda s: 2 * s.model_dim * (s.model_dim if s.log_sparse.convolution == "full" else 1),
)
ROWS = {
    "log_sparse": Family(
        (LOG_SPARSE, MLP),
        absolute="learned",
        defaults={"short_convolution": 3},
        small={"log_sparse.local": 3},
        counted_at={"model_dim": 1024},  # convolutions do more than others element by element
        connects=log_sparse_pairs,
    )
}
