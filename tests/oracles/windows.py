"""Attention to windows: Longformer's (sections 3.1, 3.2), and spans that are learned (Adaptive Span, eq. 3)."""

import math
from types import SimpleNamespace

import numpy as np

from oracles.attention import Row, attend, heads, pairs_where, rotated
from oracles.convolution import mapped


def layer_window(settings: SimpleNamespace) -> int:
    """Tokens that a head without gaps sees one way, in layer `settings.number`."""
    window = settings.window
    return min(round(window.size * window.growth**settings.number), max(settings.max_length, window.size))


def gap_of(settings: SimpleNamespace, head: int) -> int:
    """Places from one visible token to the next; the last heads are dilated."""
    gaps = settings.window.dilations
    dilated = head >= settings.num_heads - settings.window.dilated_heads
    return gaps[settings.number * len(gaps) // settings.num_layers] if dilated else 1


def in_window(settings: SimpleNamespace, head: int, t: int, u: int) -> bool:
    """Whether the window reaches from t to u."""
    gap = gap_of(settings, head)
    return abs(t - u) % gap == 0 and abs(t - u) // gap < layer_window(settings)


def is_global(row: Row, settings: SimpleNamespace, t: int) -> bool:
    """Whether t is one of the first tokens of its document, which is contiguous."""
    begin = next((u for u in range(t + 1) if row.sees(t, u)), t)
    return t - begin < settings.window.global_tokens


def longformer_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether some head's query t has a weight for key u."""
    del p

    def joined(t: int, u: int) -> bool:
        near = any(in_window(settings, h, t, u) for h in range(settings.num_heads))
        return row.sees(t, u) and (near or is_global(row, settings, t) or is_global(row, settings, u))

    return pairs_where(joined, len(x_LxD))


def longformer_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o; a global token's output comes from queries, keys and values of its own."""

    def of(head: int, prefix: str, sees) -> np.ndarray:
        q, k, v = (
            heads(mapped(x_LxD, p, prefix + name, row, settings), settings.num_heads)[head]
            for name in ("query", "key", "value")
        )
        return attend(
            *(rotated(x, row, settings) for x in (q, k)),
            v,
            sees,
            function="softmax",
            factor=1 / math.sqrt(q.shape[1]),
            divisor=lambda visible: 1,
            bias=lambda t, u: 0.0,
        )

    chosen = np.array([is_global(row, settings, t) for t in range(len(x_LxD))])
    outs = []
    for h in range(settings.num_heads):
        sees = lambda t, u, h=h: row.sees(t, u) and (chosen[u] or in_window(settings, h, t, u))
        out = of(h, "", sees)
        outs.append(np.where(chosen[:, None], of(h, "global_", row.sees), out) if chosen.any() else out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


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
