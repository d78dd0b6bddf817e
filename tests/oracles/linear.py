"""Linear attention pair by pair ("Transformers are RNNs", eq. 4): Σ φ(q_t)·φ(k_u) v_u / Σ φ(q_t)·φ(k_u)."""

from collections.abc import Callable

import numpy as np

from oracles.attention import Row, apply_rotary, split_heads
from oracles.convolution import project


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    """x + 1 above zero, e^x below."""
    return np.array([x_i + 1 if x_i > 0 else np.exp(x_i) for x_i in x])


def log_dot(log_x: np.ndarray, log_y: np.ndarray) -> float:
    """Computes log Σ_f x_f y_f from the logarithms of x and y."""
    logs = log_x + log_y
    return logs.max() + np.log(np.exp(logs - logs.max()).sum())


def attend_by_logs(x_LxD: np.ndarray, p: dict, row: Row, settings, log_features: Callable) -> np.ndarray:
    """Concat(head_h) W_o, computed from the logarithms of the features."""
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )
    outs = []
    for h in range(settings.num_heads):
        log_q, log_k = ([log_features(y) for y in apply_rotary(x[h], row, settings)] for x in (q, k))
        out = np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            visible = [u for u in range(len(x_LxD)) if row.sees(t, u)]
            if visible:
                logs = np.array([log_dot(log_q[t], log_k[u]) for u in visible])
                weights = np.exp(logs - logs.max())
                out[t] = sum(w * v[h][u] for w, u in zip(weights, visible, strict=True)) / weights.sum()
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]
