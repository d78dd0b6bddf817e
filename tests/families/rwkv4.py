"""RWKV-4 pair by pair (Peng et al. 2023, eq. 11–20); the bidirectional form weights later tokens in the same way."""

import numpy as np
from oracles import counting
from oracles.attention import Row
from oracles.row import Family, Sublayer


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def shift_tokens(x_LxD: np.ndarray, share_D: np.ndarray, row: Row) -> np.ndarray:
    """Token shift: μ x_t + (1 − μ) x_(t−1), with x = 0 before a document."""
    before = np.zeros_like(x_LxD)
    for t in range(1, len(x_LxD)):
        if row.sees(t, t) and row.sees(t, t - 1):
            before[t] = x_LxD[t - 1]
    return share_D * x_LxD + (1 - share_D) * before


def time_mix(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(σ(R) ⊙ wkv) W_o."""
    r, k, v = (
        shift_tokens(x_LxD, p["convolutions"][name], row) @ p[name]["kernel"] for name in ("receptance", "key", "value")
    )
    return (sigmoid(r) * wkv(k, v, p["core"], row)) @ p["output"]["kernel"]


def wkv(k: np.ndarray, v: np.ndarray, core: dict, row: Row) -> np.ndarray:
    rate, out = np.exp(core["log_rate"]), np.zeros_like(v)
    for t in range(len(k)):
        visible = [u for u in range(len(k)) if row.sees(t, u)]
        if visible:
            logs = np.array([k[u] + (core["bonus"] if u == t else -(abs(t - u) - 1) * rate) for u in visible])
            weights = np.exp(logs - logs.max(axis=0))
            out[t] = (weights * v[visible]).sum(axis=0) / weights.sum(axis=0)
    return out


def channel_mix(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """σ(R) ⊙ (relu(K)² W_v)."""
    r = shift_tokens(x_LxD, p["shift"]["receptance"], row) @ p["receptance"]["kernel"]
    k = shift_tokens(x_LxD, p["shift"]["key"], row) @ p["up"]["kernel"]
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
        xla_counts_flops=False,  # XLA also counts the masked half of the pairs in causal chunks, which both forms have
        constant_state=True,
        decays=True,
        recomputes_products=True,
        by_pairs=False,
    )
}
