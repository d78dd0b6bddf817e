"""Attention-free transformers pair by pair ("An Attention Free Transformer", eq. 2 and section 3)."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer

STD_EPS = 1e-5


def mix(k_LxM, v_LxE, row: Row, w) -> np.ndarray:
    """Σ_u exp(k_u + w(t, u)) v_u / Σ_u exp(k_u + w(t, u)); in log space, since exp of large keys overflows."""
    out = np.zeros_like(v_LxE)
    for t in range(len(v_LxE)):
        visible = [u for u in range(len(v_LxE)) if row.sees(t, u)]
        if not visible:
            continue
        logs = np.stack([k_LxM[u] + w(t, u) for u in visible])
        weights = np.exp(logs - logs.max(axis=0))
        out[t] = sum(weight * v_LxE[u] for weight, u in zip(weights, visible, strict=True)) / weights.sum(axis=0)
    return out


def _unit(x_LxD: np.ndarray, p: dict, row: Row, settings, count: int, head_bias) -> np.ndarray:
    gate = 1 / (1 + np.exp(-(x_LxD @ p["query"]["kernel"])))
    k, v = (split_heads(project(x_LxD, p, name, row, settings), count) for name in ("key", "value"))
    mixed = [mix(k[h], v[h], row, head_bias(h)) for h in range(count)]
    return (gate * np.concatenate(mixed, axis=1)) @ p["output"]["kernel"]


def _factorised_unit(x_LxD, p, row, settings, window: float) -> np.ndarray:
    u, v = p["core"]["query_position"], p["core"]["key_position"]

    def w(t: int, other: int) -> float:
        return u[row.positions[t]] @ v[row.positions[other]] if abs(t - other) < window else 0.0

    return _unit(x_LxD, p, row, settings, 1, lambda h: w)


def aft_full(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Every pair has a w."""
    return _factorised_unit(x_LxD, p, row, settings, np.inf)


def aft_local(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Pairs in the window have a w; for all others w = 0."""
    return _factorised_unit(x_LxD, p, row, settings, settings.aft.window)


def aft_simple(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """w = 0 for all pairs."""
    return _unit(x_LxD, p, row, settings, 1, lambda h: lambda t, u: 0.0)


def aft_conv(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """One key and one filter per head; tap 0 is the farthest key after the query in the bidirectional form."""
    core, reach = p["core"], settings.aft.window
    first = 0 if settings.causal else reach - 1

    def head_bias(h: int):
        taps = core["taps"][h]
        taps = (taps - taps.mean()) / np.sqrt(taps.var() + STD_EPS) * core["gain"][h] + core["offset"][h]
        return lambda t, u: taps[t - u + first] if abs(t - u) < reach else 0.0

    return _unit(x_LxD, p, row, settings, settings.num_heads, head_bias)


def _tables(s: SimpleNamespace) -> int:
    return 2 * s.max_length * s.aft.bias_dim


def _flops(s: SimpleNamespace, length: int, reach: float) -> int:
    """Maps, numerator and denominator of each channel, and the products of w."""
    d = s.model_dim
    near_pairs = sum(abs(t - u) < reach for t, u in counting.visible_pairs(s, length))
    return 2 * length * 4 * d * d + 2 * near_pairs * (2 * d + s.aft.bias_dim)


def _conv_flops(s: SimpleNamespace, length: int) -> int:
    d, keys = s.model_dim, s.num_heads
    return 2 * length * (3 * d * d + d * keys) + 2 * counting.count_near_pairs(s, length, s.aft.window) * (d + keys)


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
    # It has more elementwise operations than others.
    "xla_keys": {"model_dim": 1024, "aft.window": 512, "aft.bias_dim": 64},
    "recomputes_products": True,
    "by_pairs": False,
}
ROWS = {
    # Twice the length adds one more level of rectangles, which dominates in so small a model (2.1 times at
    # `configs/small.py`). An array of all pairs would be four times as large.
    "aft_full": Family(
        (AFT_FULL, MLP), tables=_tables, like="aft_local", limits_length=True, growth="memory", memory=2.5, **_ALL
    ),
    "aft_local": Family(
        (AFT_LOCAL, MLP), tables=_tables, constant_state=True, limits_length=True, growth="linear", **_ALL
    ),
    "aft_simple": Family((AFT_SIMPLE, MLP), like="aft_local", constant_state=True, growth="linear", **_ALL),
    "aft_conv": Family(
        (AFT_CONV, MLP),
        # Its keys take no D² parameters.
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(9, 2, s.model_dim)},
        like="aft_local",
        constant_state=True,
        growth="linear",
        **_ALL,
    ),
}
