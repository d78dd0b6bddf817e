"""Transformer-XL's attention (section 3.3), pair by pair: the query's segment and the one before."""

import math

import numpy as np

from oracles.attention import Row, heads, pairs_where
from oracles.positions import sinusoid


def within_reach(settings, t: int, u: int) -> bool:
    """Whether the segment of u is that of t, or touches it."""
    return abs(t // settings.xl.segment - u // settings.xl.segment) <= 1


def segment_pairs(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """L×L: whether t has a weight for u."""
    del p
    return pairs_where(lambda t, u: row.sees(t, u) and within_reach(settings, t, u), len(x_LxD))


def segment_attention(x_LxD: np.ndarray, p: dict, row: Row, settings, memory_LxD: np.ndarray | None = None):
    """Concat(head_h) W_o with A_ij = (q_i + u)·k_j + (q_i + v)·W_r R_(i−j).

    Args:
        x_LxD: the input.
        p: parameters.
        row: who sees whom.
        settings: of the model.
        memory_LxD: what tokens of other segments are taken from; None: the input.
    """
    memory_LxD = x_LxD if memory_LxD is None else memory_LxD
    width = x_LxD.shape[1] // settings.num_heads
    of = lambda x, name: heads(x @ p[name]["kernel"], settings.num_heads)
    q, k, v, far_k, far_v = of(x_LxD, "query"), *(of(x, name) for x in (x_LxD, memory_LxD) for name in ("key", "value"))
    outs = []
    for h in range(settings.num_heads):
        out = np.zeros((len(x_LxD), width))
        for t in range(len(x_LxD)):
            keys = [u for u in range(len(x_LxD)) if row.sees(t, u) and within_reach(settings, t, u)]
            if not keys:
                continue
            scores, values = [], []
            for u in keys:
                own = u // settings.xl.segment == t // settings.xl.segment
                distance = (sinusoid(t - u, x_LxD.shape[1]) @ p["distance"]["kernel"])[h * width : (h + 1) * width]
                content = (q[h][t] + p["content_bias"][h]) @ (k if own else far_k)[h][u]
                scores.append((content + (q[h][t] + p["position_bias"][h]) @ distance) / math.sqrt(width))
                values.append((v if own else far_v)[h][u])
            weights = np.exp(np.array(scores) - max(scores))
            out[t] = weights @ np.array(values) / weights.sum()
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]
