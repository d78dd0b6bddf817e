"""Gated linear attention token by token: S ← diag(α) S + kᵀ v; o = q S; from nothing in each document."""

import math

import numpy as np

from oracles.attention import Row, heads, silu
from oracles.convolution import mapped
from oracles.ssd import softplus


def recurrence(q, k, v, log_decay, runs) -> np.ndarray:
    """L×E, of one head; padding, run 0, gets zeros."""
    out, state = np.zeros(v.shape), np.zeros((k.shape[1], v.shape[1]))
    for t in range(len(v)):
        if t == 0 or runs[t] != runs[t - 1]:
            state = np.zeros_like(state)
        state = np.exp(log_decay[t])[:, None] * state + np.outer(k[t], v[t])
        out[t] = q[t] @ state if runs[t] else 0
    return out


def gated_linear(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(norm(o) ⊙ silu(x W_g)) W_o (Yang et al. 2023, section 4.4); both ways: odd heads from the row's end."""
    count, length = settings.num_heads, len(x_LxD)
    q, k, v = (heads(mapped(x_LxD, p, name, row, settings), count) for name in ("query", "key", "value"))
    gates = x_LxD @ p["decay_down"]["kernel"] @ p["decay_up"]["kernel"] + p["decay_bias"]
    logs = heads(np.maximum(-softplus(-gates) / settings.gla.gate_normalizer, settings.gla.gate_floor), count)
    runs = [1 + min(u for u in range(length) if row.sees(t, u)) if row.sees(t, t) else 0 for t in range(length)]
    outs = []
    for h in range(count):
        turn = slice(None, None, 1 if settings.causal or h % 2 == 0 else -1)
        inputs = (q[h] / math.sqrt(k[h].shape[1]), k[h], v[h], logs[h], np.array(runs))
        out = recurrence(*(x[turn] for x in inputs))[turn]
        outs.append(out / np.sqrt((out**2).mean(axis=1, keepdims=True) + 1e-6) * p["gain"])
    return (np.concatenate(outs, axis=1) * silu(x_LxD @ p["gate"]["kernel"])) @ p["output"]["kernel"]
