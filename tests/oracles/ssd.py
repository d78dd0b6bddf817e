"""State space units pair by pair (Dao and Gu 2024, eq. 1 and section 7; both ways: Hwang et al. 2024, section 3)."""

import numpy as np

from oracles.attention import Row, heads, silu
from oracles.convolution import mapped
from oracles.norms import normalise


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), also where e^x overflows."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def state_space(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """norm((y + skip ⊙ x) ⊙ silu(z)) W_o."""
    x, shared = (silu(mapped(x_LxD, p, name, row, settings) + p[f"{name}_bias"]) for name in ("value", "shared"))
    count, length = len(p["skip"]), len(x_LxD)
    skip = p["skip"] if settings.causal else p["skip"] + x @ p["skip_map"]["kernel"]
    out = x * np.repeat(np.broadcast_to(skip, (length, count)), x.shape[1] // count, axis=1)
    ways = 1 if settings.causal else 2
    raw = [(x_LxD @ p["step_size"]["kernel"])[:, way::ways] for way in range(ways)]
    for way, bc in enumerate(np.split(shared, ways, axis=1)):
        b, c = np.split(bc, 2, axis=1)
        steps = softplus(raw[way] + p["step_bias"])
        logs = -np.exp(p["log_rate"]) * steps
        for h, values in enumerate(heads(x, count)):
            for t in range(length):
                # Causal: the token reads its own sum. Hydra: that of its neighbour, if they are of one document.
                reader = t if settings.causal else t + (-1, 1)[way]
                if not (0 <= reader < length and row.sees(t, reader)):
                    continue
                for u in range(reader + 1) if way == 0 else range(reader, length):
                    if row.sees(reader, u):
                        between = slice(u + 1, reader + 1) if way == 0 else slice(reader, u)
                        weight = np.exp(logs[between, h].sum()) * (c[reader] @ b[u]) * steps[u, h]
                        out[t, h * values.shape[1] : (h + 1) * values.shape[1]] += weight * values[u]
    gated = out * silu(x_LxD @ p["gate"]["kernel"])
    return normalise("rms", gated, p["norm"], settings.norm_epsilon) @ p["output"]["kernel"]
