"""Adaptive attention span, pair by pair (Sukhbaatar et al. 2019, eq. 3)."""

import math

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, pair_matrix, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def spans(p: dict, settings) -> np.ndarray:
    """Span z of each head in tokens: S times its share."""
    return settings.span.limit * np.asarray(p["core"]["share"])


def span_mask(z: float, settings, t: int, u: int) -> float:
    """Soft mask m_z: one inside the span, then a linear ramp to zero; zero beyond the limit."""
    distance, ramp = abs(t - u), settings.span.ramp
    return 0.0 if distance >= settings.span.limit else min(max((ramp + z - distance) / ramp, 0.0), 1.0)


def adaptive_span_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether some head's query t has a weight for key u."""
    has_weight = lambda t, u: row.sees(t, u) and any(span_mask(z, settings, t, u) > 0 for z in spans(p, settings))
    return pair_matrix(has_weight, len(x_LxD))


def adaptive_span_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o with weights m e^s / Σ m e^s."""
    qs, ks, vs = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    outs = []
    for q, k, v, z in zip(qs, ks, vs, spans(p, settings), strict=True):
        q, k, out = apply_rotary(q, row, settings), apply_rotary(k, row, settings), np.zeros_like(v)
        for t in range(len(x_LxD)):
            visible = [u for u in range(len(x_LxD)) if row.sees(t, u) and span_mask(z, settings, t, u) > 0]
            scores = {u: q[t] @ k[u] / math.sqrt(q.shape[1]) for u in visible}
            weights = {u: span_mask(z, settings, t, u) * math.exp(scores[u] - max(scores.values())) for u in visible}
            if weights:
                out[t] = sum(weight * v[u] for u, weight in weights.items()) / sum(weights.values())
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


SPAN = Sublayer(
    adaptive_span_attention,
    lambda s: 4 * s.model_dim**2 + s.num_heads,
    # FLOPs of the largest span.
    lambda s, length: (
        2 * length * 4 * s.model_dim**2 + 2 * counting.count_near_pairs(s, length, s.span.limit) * 2 * s.model_dim
    ),
    lambda s: 3 * s.model_dim,
)
ROWS = {
    "adaptive_span": Family(
        (SPAN, MLP),
        rotary=True,
        small={"span.limit": 12, "span.ramp": 3},
        xla_keys={"model_dim": 1024, "span.limit": 512},  # the mask has many elementwise operations
        constant_state=True,
        connects=adaptive_span_pairs,
    )
}
