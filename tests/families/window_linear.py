"""A softmax window with linear attention beyond it, pair by pair ("LoLCATs", Zhang et al. 2024, section 3.2)."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, split_heads
from oracles.convolution import project
from oracles.feed_forward import GLU
from oracles.row import Family, Sublayer

from families.transformer import softmax_maps


def features(x_K: np.ndarray, map_KxP: np.ndarray) -> np.ndarray:
    """softmax([x W, −x W]), 2 P numbers."""
    mapped = x_K @ map_KxP
    exponentials = np.exp(np.concatenate([mapped, -mapped]))
    return exponentials / exponentials.sum()


def window_linear(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, o = (γ n + (1 − γ) Σ φφ v) / (γ + (1 − γ) Σ φφ) with n the softmax over the near tokens."""
    options, core = settings.window_linear, p.get("core")
    q = split_heads(project(x_LxD, p, "query", row, settings), settings.num_heads)
    k, v = (split_heads(project(x_LxD, p, name, row, settings), settings.num_kv_heads) for name in ("key", "value"))
    outs = []
    for h in range(settings.num_heads):
        shared = h * settings.num_kv_heads // settings.num_heads
        queries, keys, values = apply_rotary(q[h], row, settings), apply_rotary(k[shared], row, settings), v[shared]
        out = np.zeros((len(x_LxD), values.shape[1]))
        gamma = 1 / (1 + np.exp(-core["window_factor"][h])) if options.linear_attention else 1
        for t in range(len(x_LxD)):
            seen = [u for u in range(t + 1) if row.sees(t, u)]  # of one document, from its first token
            if not seen:
                continue
            near = [u for u in seen if t - u < options.size or u - seen[0] < options.first_tokens]
            scores = np.array([queries[t] @ keys[u] for u in near]) / math.sqrt(len(keys[0]))
            weights = np.exp(scores - scores.max())
            softmax = sum(w * values[u] for w, u in zip(weights / weights.sum(), near, strict=True))
            numerator, denominator = gamma * softmax, gamma
            for u in set(seen) - set(near) if options.linear_attention else ():
                of_query = features(q[h][t], core["query_features"][h])
                weight = (1 - gamma) * of_query @ features(k[shared][u], core["key_features"][shared])
                numerator, denominator = numerator + weight * values[u], denominator + weight
            out[t] = numerator / denominator
        outs.append(out)
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _maps(s: SimpleNamespace) -> int:
    return softmax_maps(s)


def _of_core(s: SimpleNamespace) -> int:
    """Maps to features, and a γ per head."""
    if not s.window_linear.linear_attention:
        return 0
    width = s.model_dim // s.num_heads
    return (s.num_heads + s.num_kv_heads) * width * s.window_linear.feature_dim + s.num_heads


def _flops(s: SimpleNamespace, length: int) -> int:
    options, width = s.window_linear, s.model_dim // s.num_heads
    near = sum(t - u < options.size or u < options.first_tokens for t, u in counting.visible_pairs(s, length))
    flops = 2 * length * _maps(s) + 2 * near * 2 * s.model_dim
    if not options.linear_attention or length <= options.size:
        return flops
    of_features = 2 * length * (s.num_heads + s.num_kv_heads) * width * options.feature_dim
    sums = counting.linear_sums(s, length, 2 * options.feature_dim, width + 1)
    return flops + of_features + 2 * s.num_heads * sums


WINDOW_LINEAR = Sublayer(
    window_linear,
    lambda s: _maps(s) + _of_core(s),
    _flops,
    lambda s: s.model_dim + 2 * s.model_dim // s.num_heads * s.num_kv_heads,
)
ROWS = {
    "window_linear": Family(
        (WINDOW_LINEAR, GLU),
        rotary=True,
        small={"window_linear.size": 6, "window_linear.first_tokens": 2, "window_linear.feature_dim": 5},
        letters=lambda s: {"P": s.window_linear.feature_dim, "H": s.num_heads},
        xla_counts_flops=False,  # softmaxes go by blocks
        constant_state=True,
    )
}
