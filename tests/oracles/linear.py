"""Linear attention pair by pair ("Transformers are RNNs", eq. 4): Σ φ(q_t)·φ(k_u) v_u / Σ φ(q_t)·φ(k_u)."""

import numpy as np

from oracles.attention import Row, heads, rotated


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    """x + 1 above zero, e^x below."""
    return np.array([x_i + 1 if x_i > 0 else np.exp(x_i) for x_i in x])


def linear_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o."""
    q, k, v = (heads(x_LxD @ p[name]["kernel"], settings.num_heads) for name in ("query", "key", "value"))
    outs = []
    for h in range(settings.num_heads):
        phi_q, phi_k = ([elu_plus_one(y) for y in rotated(x[h], row, settings)] for x in (q, k))
        out = np.zeros_like(v[h])
        for t in range(len(x_LxD)):
            seen = [u for u in range(len(x_LxD)) if row.sees(t, u)]
            weights = [phi_q[t] @ phi_k[u] for u in seen]
            if seen:
                out[t] = sum(w * v[h][u] for w, u in zip(weights, seen, strict=True)) / sum(weights)
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]
