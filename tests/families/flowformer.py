"""Flow attention token by token (Wu et al. 2022, eq. 4–8, and the authors' causal form)."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, split_heads
from oracles.convolution import project
from oracles.feed_forward import MLP
from oracles.row import Family, Sublayer


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x)."""
    return 1 / (1 + np.exp(-x))


def flow_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o."""
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    outs = []
    for h in range(settings.num_heads):
        queries, keys = (sigmoid(apply_rotary(x[h], row, settings)) for x in (q, k))
        outs.append(flow(queries, keys, v[h], row.sees, settings.flow.clamp))
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def flow(q_LxK: np.ndarray, k_LxK: np.ndarray, v_LxE: np.ndarray, sees, clamp: float) -> np.ndarray:
    """One head, from features. Sinks (queries) see sources (keys), and sources see sinks, where `sees` allows."""
    visible = [[u for u in range(len(q_LxK)) if sees(t, u)] for t in range(len(q_LxK))]
    real = [t for t in range(len(q_LxK)) if visible[t]]
    n = {t: len(visible[t]) for t in real}
    incoming = {t: sum(q_LxK[t] @ k_LxK[u] for u in visible[t]) for t in real}
    outgoing = {t: sum(k_LxK[t] @ q_LxK[u] for u in visible[t]) for t in real}
    # A token sees n others: each share is multiplied by n, and the sum of n shares divided by n.
    conserved_in = {t: sum(q_LxK[t] @ k_LxK[u] * n[u] / outgoing[u] for u in visible[t]) / n[t] for t in real}
    conserved_out = {t: sum(k_LxK[t] @ q_LxK[u] * n[u] / incoming[u] for u in visible[t]) / n[t] for t in real}
    strength = {t: np.exp(min(conserved_out[t], clamp)) for t in real}
    competition = {t: n[t] * strength[t] / sum(strength[u] for u in visible[t]) for t in real}
    out = np.zeros_like(v_LxE)
    for t in real:
        for u in visible[t]:
            out[t] += q_LxK[t] @ k_LxK[u] / incoming[t] * competition[u] * v_LxE[u]
        out[t] *= sigmoid(conserved_in[t])
    return out


def _flops(s: SimpleNamespace, length: int) -> int:
    """Incoming and outgoing flows, raw and conserved, and the sums; the attention has no denominator."""
    width = s.model_dim // s.num_heads
    sums = counting.linear_sums(s, length, width, width)
    return 2 * length * 4 * s.model_dim**2 + 2 * s.num_heads * (4 * width * length + sums)


FLOW = Sublayer(flow_attention, lambda s: 4 * s.model_dim**2, _flops, lambda s: 3 * s.model_dim)
ROWS = {"flowformer": Family((FLOW, MLP), absolute="learned", constant_state=True, one_pass=True, growth="linear")}
