"""The gated delta rule token by token: S ← e^g S; S ← S + kᵀ β (v − k S); o = q S; from nothing in each document."""

import numpy as np


def recurrence(q, k, v, log_decay, beta, runs) -> np.ndarray:
    """L×E, of one head; padding, run 0, gets zeros."""
    out, state = np.zeros(v.shape), np.zeros((k.shape[1], v.shape[1]))
    for t in range(len(v)):
        if t == 0 or runs[t] != runs[t - 1]:
            state = np.zeros_like(state)
        state = np.exp(log_decay[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        out[t] = q[t] @ state if runs[t] else 0
    return out
