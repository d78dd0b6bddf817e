"""RWKV-4 pair by pair (Peng et al. 2023, eq. 11–20), both ways: the same weights for tokens after."""

import numpy as np
from oracles import counting
from oracles.attention import Row
from oracles.row import Family, Sublayer


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def shifted(x_LxD: np.ndarray, share_D: np.ndarray, row: Row) -> np.ndarray:
    """μ x_t + (1 − μ) x_(t−1); zeros before a document."""
    before = np.zeros_like(x_LxD)
    for t in range(1, len(x_LxD)):
        if row.sees(t, t) and row.sees(t, t - 1):
            before[t] = x_LxD[t - 1]
    return share_D * x_LxD + (1 - share_D) * before


def time_mix(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(σ(R) ⊙ wkv) W_o."""
    r, k, v = (
        shifted(x_LxD, p["convolutions"][name], row) @ p[name]["kernel"] for name in ("receptance", "key", "value")
    )
    return (sigmoid(r) * wkv(k, v, p["core"], row)) @ p["output"]["kernel"]


def wkv(k: np.ndarray, v: np.ndarray, core: dict, row: Row) -> np.ndarray:
    rate, out = np.exp(core["log_rate"]), np.zeros_like(v)
    for t in range(len(k)):
        seen = [u for u in range(len(k)) if row.sees(t, u)]
        if seen:
            logs = np.array([k[u] + (core["bonus"] if u == t else -(abs(t - u) - 1) * rate) for u in seen])
            weights = np.exp(logs - logs.max(axis=0))
            out[t] = (weights * v[seen]).sum(axis=0) / weights.sum(axis=0)
    return out


def channel_mix(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """σ(R) ⊙ (relu(K)² W_v)."""
    r = shifted(x_LxD, p["shift"]["receptance"], row) @ p["receptance"]["kernel"]
    k = shifted(x_LxD, p["shift"]["key"], row) @ p["up"]["kernel"]
    return sigmoid(r) * (np.maximum(k, 0) ** 2 @ p["down"]["kernel"])


TIME_MIX = Sublayer(
    time_mix, lambda s: 4 * s.model_dim**2 + 5 * s.model_dim, lambda s, length: 2 * length * 4 * s.model_dim**2
)
CHANNEL_MIX = Sublayer(
    channel_mix,
    lambda s: s.model_dim**2 + 2 * s.model_dim * s.mlp_dim + 2 * s.model_dim,
    lambda s, length: 2 * length * (s.model_dim**2 + 2 * s.model_dim * s.mlp_dim),
)
ROWS = {
    "rwkv4": Family(
        (TIME_MIX, CHANNEL_MIX),
        defaults={"mlp_dim": lambda s: counting.multiple_of_8(7, 2, s.model_dim)},
        counted=False,  # it sums causal chunks in either form: half of the pairs that XLA computes there are hidden
        constant_state=True,
        forgets=True,
        recomputes=True,
        by_pairs=False,
    )
}
