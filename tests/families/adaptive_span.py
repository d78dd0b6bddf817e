"""Spans that are learned, pair by pair (Sukhbaatar et al. 2019, eq. 3)."""

import math

import numpy as np
from oracles import counting
from oracles.attention import Row, heads, pairs_where, rotated
from oracles.convolution import mapped
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def spans(p: dict, settings) -> np.ndarray:
    """Of each head, z = S times its share, in places."""
    return settings.span.limit * np.asarray(p["core"]["share"])


def in_span(z: float, settings, t: int, u: int) -> float:
    """m_z: one inside the span, then falling to zero; nothing further away than the limit."""
    distance, ramp = abs(t - u), settings.span.ramp
    return 0.0 if distance >= settings.span.limit else min(max((ramp + z - distance) / ramp, 0.0), 1.0)


def adaptive_span_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether some head's query t has a weight for key u."""
    spanned = lambda t, u: row.sees(t, u) and any(in_span(z, settings, t, u) > 0 for z in spans(p, settings))
    return pairs_where(spanned, len(x_LxD))


def adaptive_span_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o with weights m e^s / Σ m e^s."""
    qs, ks, vs = (
        heads(mapped(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    outs = []
    for q, k, v, z in zip(qs, ks, vs, spans(p, settings), strict=True):
        q, k, out = rotated(q, row, settings), rotated(k, row, settings), np.zeros_like(v)
        for t in range(len(x_LxD)):
            seen = [u for u in range(len(x_LxD)) if row.sees(t, u) and in_span(z, settings, t, u) > 0]
            scores = {u: q[t] @ k[u] / math.sqrt(q.shape[1]) for u in seen}
            weights = {u: in_span(z, settings, t, u) * math.exp(scores[u] - max(scores.values())) for u in seen}
            if weights:
                out[t] = sum(weight * v[u] for u, weight in weights.items()) / sum(weights.values())
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


SPAN = Sublayer(
    adaptive_span_attention,
    lambda s: 4 * s.model_dim**2 + s.num_heads,
    # Of the largest spans.
    lambda s, length: 2 * length * 4 * s.model_dim**2 + 2 * counting.near(s, length, s.span.limit) * 2 * s.model_dim,
    lambda s: 3 * s.model_dim,
)
ROWS = {
    "adaptive_span": Family(
        (SPAN, MLP),
        rotary=True,
        small={"span.limit": 12, "span.ramp": 3},
        counted_at={"model_dim": 1024, "span.limit": 512},  # a bias does more than others element by element
        constant_state=True,
        connects=adaptive_span_pairs,
    )
}
