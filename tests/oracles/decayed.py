"""The decayed recurrence token by token: S ← e^g S + kᵀ v, o = q S, with S = 0 at the start of each document."""

from types import SimpleNamespace

import numpy as np

from oracles.attention import silu


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


def finish(outs: list[np.ndarray], x_LxD: np.ndarray, p: dict, settings: SimpleNamespace) -> np.ndarray:
    """(norm(o) ⊙ silu(x W_g)) W_o of the heads' outputs L×E; the norm and the gate may be left out."""
    if settings.head_norm:
        outs = [out / np.sqrt((out**2).mean(axis=1, keepdims=True) + 1e-6) * p["gain"] for out in outs]
    gate = silu(x_LxD @ p["gate"]["kernel"]) if settings.output_gate == "silu" else 1
    return (np.concatenate(outs, axis=1) * gate) @ p["output"]["kernel"]
