"""Attention over pairs, and the quadratic mixers: multi-head softmax attention and FLASH-Quad's unit."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oracles import normalizers
from oracles.attention_functions import weights
from oracles.convolution import mapped
from oracles.positions import relative_bias, rope


class Row(NamedTuple):
    """What a mixer knows of the tokens of one row: who sees whom, and the position of each in its document."""

    sees: Callable[[int, int], bool]
    positions: list[int]


def attend(q_LxK, k_LxK, v_LxE, sees, *, function, factor, divisor, bias) -> np.ndarray:
    """Σ_u f(factor · q_t·k_u + bias(t, u)) / N · v_u over the keys u that t sees; divisor(number of them) = N."""
    out_LxE = np.zeros((len(q_LxK), v_LxE.shape[1]))
    for t, q_K in enumerate(q_LxK):
        keys = [u for u in range(len(k_LxK)) if sees(t, u)]
        if not keys:
            continue
        scores = [factor * (q_K @ k_LxK[u]) + bias(t, u) for u in keys]
        for u, weight in zip(keys, weights(function, scores, divisor(len(keys))), strict=True):
            out_LxE[t] += weight * v_LxE[u]
    return out_LxE


def pairs_where(joined: Callable[[int, int], bool], length: int) -> np.ndarray:
    """L×L of bool."""
    return np.array([[joined(t, u) for u in range(length)] for t in range(length)])


def silu(x: np.ndarray) -> np.ndarray:
    """x σ(x)."""
    return x / (1 + np.exp(-x))


def rotated(x_LxK: np.ndarray, row: Row, settings) -> np.ndarray:
    """Rotary positions, where the model has them."""
    if not settings.rotary:
        return x_LxK
    base = settings.rotary_base
    return np.stack([rope(x_K, position, base) for x_K, position in zip(x_LxK, row.positions, strict=True)])


def heads(x_LxD: np.ndarray, count: int) -> list[np.ndarray]:
    """The columns of each head."""
    width = x_LxD.shape[1] // count
    return [x_LxD[:, h * width : (h + 1) * width] for h in range(count)]


def softmax_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o, head_h = softmax(q kᵀ / √K) v, where neighbouring heads of queries may share k and v."""
    q = heads(mapped(x_LxD, p, "query", row, settings), settings.num_heads)
    k, v = (heads(mapped(x_LxD, p, name, row, settings), settings.num_kv_heads) for name in ("key", "value"))
    outs = []
    for h in range(settings.num_heads):
        shared = h * settings.num_kv_heads // settings.num_heads  # head of keys and values
        outs.append(
            attend(
                rotated(q[h], row, settings),
                rotated(k[shared], row, settings),
                v[shared],
                row.sees,
                function="softmax",
                factor=1 / math.sqrt(q[h].shape[1]),
                divisor=lambda visible: 1,
                bias=lambda t, u: 0.0,
            )
        )
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def gated_unit(x_LxD: np.ndarray, p: dict, row: Row, settings, mix: Callable) -> np.ndarray:
    """(U ⊙ concat(mix(variants_h, V_h))) W_o.

    The variants of a head are its queries and keys in the order q, k of the first part, q, k of the second.
    """
    u_LxE, v_LxE = (silu(mapped(x_LxD, p, name, row, settings)) for name in ("gate", "value"))
    mixed = []
    for h, v in enumerate(heads(v_LxE, settings.gau.heads)):
        mixed.append(mix([rotated(x, row, settings) for x in _variants(x_LxD, p, h, row, settings)], v))
    return (u_LxE * np.concatenate(mixed, axis=1)) @ p["output"]["kernel"]


def _variants(x_LxD: np.ndarray, p: dict, h: int, row: Row, settings) -> list[np.ndarray]:
    """Of head h: Z ⊙ γ_i + β_i, with one Z for all or a Z_i each."""
    count, width = settings.gau.heads, settings.gau.shared_dim
    z_LxS = silu(mapped(x_LxD, p, "shared", row, settings))
    scales, offsets = (p["variants"][name].reshape(-1, count, width) for name in ("scale", "offset"))
    zs = [z_LxS] * len(scales)
    if settings.gau.query_key == "dense":
        zs = heads(heads(z_LxS, count)[h], len(scales))
    return [z * scale + offset for z, scale, offset in zip(zs, scales[:, h], offsets[:, h], strict=True)]


def gau_quadratic(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(U ⊙ f(q kᵀ · factor + b) / divisor · V) W_o."""
    length, function = len(x_LxD), settings.gau.attention_function
    n = normalizers.of_row(settings, length)

    def mix(variants: list[np.ndarray], v: np.ndarray) -> np.ndarray:
        q, k = variants
        return attend(
            q,
            k,
            v,
            row.sees,
            function=function,
            factor=normalizers.score_factor(settings, function, q.shape[1], n),
            divisor=lambda visible: normalizers.quadratic(settings, visible, length),
            bias=relative_bias(settings.gau.relative_bias, settings.max_length, settings.causal, p["core"].get("bias")),
        )

    return gated_unit(x_LxD, p, row, settings, mix)
