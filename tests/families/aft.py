"""Attention-free transformers pair by pair ("An Attention Free Transformer", eq. 2 and section 3)."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, heads
from oracles.convolution import mapped
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer

STD_EPS = 1e-5


def mix(k_LxM, v_LxE, row: Row, w) -> np.ndarray:
    """Σ_u exp(k_u + w(t, u)) v_u / Σ_u exp(k_u + w(t, u)); in log space, since exp of large keys overflows."""
    out = np.zeros_like(v_LxE)
    for t in range(len(v_LxE)):
        seen = [u for u in range(len(v_LxE)) if row.sees(t, u)]
        if not seen:
            continue
        logs = np.stack([k_LxM[u] + w(t, u) for u in seen])
        weights = np.exp(logs - logs.max(axis=0))
        out[t] = sum(weight * v_LxE[u] for weight, u in zip(weights, seen, strict=True)) / weights.sum(axis=0)
    return out


def _unit(x_LxD: np.ndarray, p: dict, row: Row, settings, count: int, w_of_head) -> np.ndarray:
    gate = 1 / (1 + np.exp(-(x_LxD @ p["query"]["kernel"])))
    k, v = (heads(mapped(x_LxD, p, name, row, settings), count) for name in ("key", "value"))
    mixed = [mix(k[h], v[h], row, w_of_head(h)) for h in range(count)]
    return (gate * np.concatenate(mixed, axis=1)) @ p["output"]["kernel"]


def _factorised(x_LxD, p, row, settings, window: float) -> np.ndarray:
    u, v = p["core"]["query_position"], p["core"]["key_position"]

    def w(t: int, other: int) -> float:
        return u[row.positions[t]] @ v[row.positions[other]] if abs(t - other) < window else 0.0

    return _unit(x_LxD, p, row, settings, 1, lambda h: w)


def aft_full(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Every pair has a w."""
    return _factorised(x_LxD, p, row, settings, np.inf)


def aft_local(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Pairs in the window have a w; the others count with zero."""
    return _factorised(x_LxD, p, row, settings, settings.aft.window)


def aft_simple(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """No w."""
    return _unit(x_LxD, p, row, settings, 1, lambda h: lambda t, u: 0.0)


def aft_conv(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """One key and one filter a head; tap 0 is the farthest key after the query that a bidirectional one reaches."""
    core, reach = p["core"], settings.aft.window
    first = 0 if settings.causal else reach - 1

    def w_of_head(h: int):
        taps = core["taps"][h]
        taps = (taps - taps.mean()) / np.sqrt(taps.var() + STD_EPS) * core["gain"][h] + core["offset"][h]
        return lambda t, u: taps[t - u + first] if abs(t - u) < reach else 0.0

    return _unit(x_LxD, p, row, settings, settings.num_heads, w_of_head)


def _tables(s: SimpleNamespace) -> int:
    return 2 * s.max_length * s.aft.bias_dim


def _flops(s: SimpleNamespace, length: int, reach: float) -> int:
    """With those of the numerator and denominator of each channel, and of w itself."""
    d = s.model_dim
    near = sum(abs(t - u) < reach for t, u in counting.pairs(s, length))
    return 2 * length * 4 * d * d + 2 * near * (2 * d + s.aft.bias_dim)


def _conv_flops(s: SimpleNamespace, length: int) -> int:
    d, keys = s.model_dim, s.num_heads
    return 2 * length * (3 * d * d + d * keys) + 2 * counting.near(s, length, s.aft.window) * (d + keys)


AFT_FULL = Sublayer(
    aft_full,
    lambda s: 4 * s.model_dim**2 + _tables(s),
    lambda s, length: _flops(s, length, math.inf),
    lambda s: 2 * s.model_dim,
)
AFT_LOCAL = Sublayer(
    aft_local,
    lambda s: 4 * s.model_dim**2 + _tables(s),
    lambda s, length: _flops(s, length, s.aft.window),
    lambda s: 2 * s.model_dim,
)
AFT_SIMPLE = Sublayer(
    aft_simple,
    lambda s: 4 * s.model_dim**2,
    lambda s, length: 2 * length * 4 * s.model_dim**2,
    lambda s: 2 * s.model_dim,
)
AFT_CONV = Sublayer(
    aft_conv,
    lambda s: (
        3 * s.model_dim**2 + s.num_heads * (s.model_dim + (s.aft.window if s.causal else 2 * s.aft.window - 1) + 2)
    ),
    _conv_flops,
    lambda s: s.model_dim + s.num_heads,
)
_ALL = {
    "absolute": "learned",
    "small": {"aft.window": 5, "aft.bias_dim": 6},
    "letters": lambda s: {"W": s.aft.window, "R": s.aft.bias_dim},
    "sizes": ({"aft.window": 5, "aft.bias_dim": 6}, {"aft.window": 7, "aft.bias_dim": 4}),
    # It does more than others element by element.
    "counted_at": {"model_dim": 1024, "aft.window": 512, "aft.bias_dim": 64},
    "recomputes": True,
    "by_pairs": False,
}
ROWS = {
    # It holds one more level of rectangles, of which there is little else in so small a model (2.1 times at
    # `configs/small.py`), and no array of all pairs, which would be four times as large.
    "aft_full": Family(
        (AFT_FULL, MLP), tables=_tables, like="aft_local", ends=True, grows="memory", memory=2.5, **_ALL
    ),
    "aft_local": Family((AFT_LOCAL, MLP), tables=_tables, constant_state=True, ends=True, grows="linear", **_ALL),
    "aft_simple": Family((AFT_SIMPLE, MLP), like="aft_local", constant_state=True, grows="linear", **_ALL),
    "aft_conv": Family(
        (AFT_CONV, MLP),
        # Its keys take no D² parameters.
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(9, 2, s.model_dim)},
        like="aft_local",
        constant_state=True,
        grows="linear",
        **_ALL,
    ),
}
