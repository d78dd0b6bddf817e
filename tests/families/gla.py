"""Gated linear attention token by token: S ← diag(α) S + kᵀ v; o = q S; S = 0 at the start of a document."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, split_heads
from oracles.convolution import project
from oracles.decayed import finish, softplus
from oracles.feed_forward import GLU
from oracles.row import Family, Sublayer


def recurrence(q, k, v, log_decay, runs) -> np.ndarray:
    """Output of one head, L×E; padding (run 0) gets zeros."""
    out, state = np.zeros(v.shape), np.zeros((k.shape[1], v.shape[1]))
    for t in range(len(v)):
        if t == 0 or runs[t] != runs[t - 1]:
            state = np.zeros_like(state)
        state = np.exp(log_decay[t])[:, None] * state + np.outer(k[t], v[t])
        out[t] = q[t] @ state if runs[t] else 0
    return out


def gated_linear(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(norm(o) ⊙ silu(x W_g)) W_o (Yang et al. 2023, section 4.4); bidirectional: odd heads run backwards.

    Without a gate it is norm(o) W_o, and without a norm of the heads o takes the place of norm(o).
    """
    count, length = settings.num_heads, len(x_LxD)
    q, k, v = (split_heads(project(x_LxD, p, name, row, settings), count) for name in ("query", "key", "value"))
    gates = x_LxD @ p["decay_down"]["kernel"] @ p["decay_up"]["kernel"] + p["decay_bias"]
    logs = split_heads(np.maximum(-softplus(-gates) / settings.gla.gate_normalizer, settings.gla.gate_floor), count)
    runs = [1 + min(u for u in range(length) if row.sees(t, u)) if row.sees(t, t) else 0 for t in range(length)]
    outs = []
    for h in range(count):
        turn = slice(None, None, 1 if settings.causal or h % 2 == 0 else -1)
        inputs = (q[h] / math.sqrt(k[h].shape[1]), k[h], v[h], logs[h], np.array(runs))
        out = recurrence(*(x[turn] for x in inputs))[turn]
        outs.append(out)
    return finish(outs, x_LxD, p, settings)


def _maps(s: SimpleNamespace) -> int:
    d, keys = s.model_dim, s.gla.key_dim
    return d * (2 * keys + 2 * d + d * (s.output_gate == "silu")) + s.gla.gate_rank * (d + keys)


def _flops(s: SimpleNamespace, length: int) -> int:
    """The chunk size is bounded so that log decays sum to −80 at most."""
    key, value = s.gla.key_dim // s.num_heads, s.model_dim // s.num_heads
    size = min(s.linear.chunk_size, math.floor(80 / -s.gla.gate_floor))
    inside, entering, reading = counting.count_chunk_terms(length, size)
    sums = inside * (key + value) + (entering + reading) * key * value
    return 2 * length * _maps(s) + 2 * s.num_heads * sums


GLA = Sublayer(
    gated_linear,
    # Maps, a bias of the decays, and one gain that all heads share.
    lambda s: _maps(s) + s.gla.key_dim + s.head_norm * s.model_dim // s.num_heads,
    _flops,
    lambda s: 2 * s.gla.key_dim + s.model_dim,
)
ROWS = {
    "gla": Family(
        (GLA, GLU),
        defaults={
            "gla.key_dim": lambda s: s.num_heads * math.ceil(s.model_dim / 2 / s.num_heads),
            "output_gate": "silu",
            "head_norm": True,
        },
        letters=lambda s: {"Q": s.model_dim // 2, "Y": s.model_dim // s.num_heads},
        xla_counts_flops=False,  # XLA also counts the masked half of the pairs in causal chunks, which both forms have
        constant_state=True,
        decays=True,
        recomputes_products=True,
        normed_heads=True,
    )
}
