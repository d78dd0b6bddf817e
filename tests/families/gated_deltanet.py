"""The gated delta rule token by token: S ← e^g S; S ← S + kᵀ β (v − k S); o = q S; from nothing in each document."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, heads, silu
from oracles.convolution import mapped
from oracles.decayed import softplus
from oracles.feed_forward import GLU
from oracles.row import Family, Sublayer


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


def gated_delta(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(norm(o) ⊙ silu(x W_g)) W_o (Yang et al. 2024, figure 1); both ways: odd heads from the row's end."""
    count, length = settings.num_heads, len(x_LxD)
    q, k, v = (heads(silu(mapped(x_LxD, p, name, row, settings)), count) for name in ("query", "key", "value"))
    beta = (2 if settings.delta.negative_eigenvalues else 1) / (1 + np.exp(-x_LxD @ p["beta"]["kernel"]))
    logs = np.zeros_like(beta)
    if settings.delta.decay:
        logs = -np.exp(p["log_rate"]) * softplus(x_LxD @ p["step_size"]["kernel"] + p["step_bias"])
    runs = [1 + min(u for u in range(length) if row.sees(t, u)) if row.sees(t, t) else 0 for t in range(length)]
    outs = []
    for h in range(count):
        turn = slice(None, None, 1 if settings.causal or h % 2 == 0 else -1)
        queries, keys = (x[h] / np.sqrt((x[h] ** 2).sum(axis=1, keepdims=True) + 1e-6) for x in (q, k))
        inputs = (queries / math.sqrt(keys.shape[1]), keys, v[h], logs[:, h], beta[:, h], np.array(runs))
        out = recurrence(*(x[turn] for x in inputs))[turn]
        outs.append(out / np.sqrt((out**2).mean(axis=1, keepdims=True) + 1e-6) * p["gain"])
    return (np.concatenate(outs, axis=1) * silu(x_LxD @ p["gate"]["kernel"])) @ p["output"]["kernel"]


def _maps(s: SimpleNamespace) -> int:
    return s.model_dim * (2 * s.delta.key_dim + 3 * s.delta.value_dim + (1 + s.delta.decay) * s.num_heads)


def _parameters(s: SimpleNamespace) -> int:
    """With a gain for all heads, and two numbers a head."""
    return _maps(s) + s.delta.value_dim // s.num_heads + 2 * s.num_heads * s.delta.decay


def _flops(s: SimpleNamespace, length: int) -> int:
    """Queries and values with keys; k kᵀ and the substitution below the diagonal; the sum."""
    key, value = s.delta.key_dim // s.num_heads, s.delta.value_dim // s.num_heads
    before, entering, reading = counting.causal_chunks(length, s.delta.chunk_size)
    inside = before * (key + value) + (before - length) * (key + key + value)
    return 2 * length * _maps(s) + 2 * s.num_heads * (inside + (2 * reading + entering) * key * value)


def _of_heads(share: float):
    return lambda s: s.num_heads * math.ceil(share * s.model_dim / s.num_heads)


def _letters(s: SimpleNamespace) -> dict[str, int]:
    values = 3 * s.model_dim // 2
    return {"U": 3 * s.model_dim // 4, "T": values, "B": values // s.num_heads}


DELTA = Sublayer(gated_delta, _parameters, _flops, lambda s: 2 * s.delta.key_dim + s.delta.value_dim)
ROWS = {
    "gated_deltanet": Family(
        (DELTA, GLU),
        defaults={
            "mlp_dim": lambda s: 2 * s.model_dim,
            "delta.key_dim": _of_heads(3 / 4),
            "delta.value_dim": _of_heads(3 / 2),
            "short_convolution": 4,
        },
        small={"delta.chunk_size": 8},
        letters=_letters,
        counted=False,  # it sums causal chunks in either form: half of the pairs that XLA computes there are hidden
        constant_state=True,
        forgets=True,
        # It has forgotten all but the last token there, and a norm by head makes as much of a small q·k as of a large
        # one: an input that differs by 6e-8 of itself moves the oracle by 2e-5 of its largest value.
        ill=("causal", "bidirectional"),
        recomputes=True,
        repeats=True,
        # Keys of three channels are nearly all alike: its gradient norm differs by 1.3e-5 there.
        mesh={"model_dim": 64, "mlp_dim": 64},
        normed_heads=True,
    )
}
