"""The decayed recurrence token by token: S ← e^g S + kᵀ v, o = q S, with S = 0 at the start of each document."""

import numpy as np


def recurrence(q, k, v, log_decay, runs) -> np.ndarray:
    """Output of one head, L×E; padding (run 0) gets zeros."""
    out, state = np.zeros(v.shape), np.zeros((k.shape[1], v.shape[1]))
    for t in range(len(v)):
        if t == 0 or runs[t] != runs[t - 1]:
            state = np.zeros_like(state)
        state = np.exp(log_decay[t]) * state + np.outer(k[t], v[t])
        out[t] = q[t] @ state if runs[t] else 0
    return out


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), also where e^x overflows."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
