"""Attention-free transformers pair by pair ("An Attention Free Transformer", eq. 2 and section 3)."""

import numpy as np

from oracles.attention import Row, heads
from oracles.convolution import mapped

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
