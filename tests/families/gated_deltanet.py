"""The gated delta rule token by token: S ← e^g S; S ← S + kᵀ β (v − k S); o = q S; S = 0 before a document."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, silu, split_heads
from oracles.convolution import project
from oracles.decayed import finish, softplus
from oracles.feed_forward import GLU
from oracles.row import Family, Sublayer


def recurrence(q, k, v, log_decay, beta, runs) -> np.ndarray:
    """Output of one head, L×E; padding (run 0) gets zeros."""
    out, state = np.zeros(v.shape), np.zeros((k.shape[1], v.shape[1]))
    for t in range(len(v)):
        if t == 0 or runs[t] != runs[t - 1]:
            state = np.zeros_like(state)
        state = np.exp(log_decay[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        out[t] = q[t] @ state if runs[t] else 0
    return out


def gated_delta(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(norm(o) ⊙ silu(x W_g)) W_o (Yang et al. 2024, figure 1); bidirectional: odd heads run backwards.

    Without a gate it is norm(o) W_o, and without a norm of the heads o takes the place of norm(o).
    """
    count, length = settings.num_heads, len(x_LxD)
    q, k, v = (split_heads(silu(project(x_LxD, p, name, row, settings)), count) for name in ("query", "key", "value"))
    beta = (2 if settings.delta.negative_eigenvalues else 1) / (1 + np.exp(-(x_LxD @ p["beta"]["kernel"])))
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
        outs.append(out)
    return finish(outs, x_LxD, p, settings)


def _maps(s: SimpleNamespace) -> int:
    values = (2 + (s.output_gate == "silu")) * s.delta.value_dim
    return s.model_dim * (2 * s.delta.key_dim + values + (1 + s.delta.decay) * s.num_heads)


def _parameters(s: SimpleNamespace) -> int:
    """Maps, one gain that all heads share, and two parameters per head."""
    return _maps(s) + s.head_norm * s.delta.value_dim // s.num_heads + 2 * s.num_heads * s.delta.decay


def _flops(s: SimpleNamespace, length: int) -> int:
    """Within chunks q kᵀ and weights v, k kᵀ and the substitution below the diagonal; across chunks the state."""
    key, value = s.delta.key_dim // s.num_heads, s.delta.value_dim // s.num_heads
    before, entering, reading = counting.count_chunk_terms(length, s.delta.chunk_size)
    inside = before * (key + value) + (before - length) * (key + key + value)
    return 2 * length * _maps(s) + 2 * s.num_heads * (inside + (2 * reading + entering) * key * value)


def _divisible_width(share: float):
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
            "delta.key_dim": _divisible_width(3 / 4),
            "delta.value_dim": _divisible_width(3 / 2),
            "short_convolution": 4,
            "output_gate": "silu",
            "head_norm": True,
        },
        small={"delta.chunk_size": 8},
        letters=_letters,
        xla_counts_flops=False,  # XLA also counts the masked half of the pairs in causal chunks, which both forms have
        constant_state=True,
        decays=True,
        # With large inputs it forgets all except the last token, and a norm per head scales a small q·k up: a relative
        # change of 6e-8 of the input moves the oracle by 2e-5 of its largest value.
        ill_conditioned=("causal", "bidirectional"),
        recomputes_products=True,
        repeats_products=True,
        # Keys of three channels are nearly parallel: with them the gradient norm differs by 1.3e-5.
        mesh={"model_dim": 64, "mlp_dim": 64},
        normed_heads=True,
    )
}
