"""FLASH's mixed chunk attention (section 3.2), pair by pair, in a gated attention unit and in heads.

The linear part is written as what it equals, Σ_u (q_t·k_u) v_u / N over the tokens u of other chunks, without any sum
that is carried along.
"""

import numpy as np

from oracles import normalizers
from oracles.attention import Row, attend, gated_unit, heads, rotated
from oracles.convolution import mapped
from oracles.positions import relative_bias


def local_part(q, k, v, row: Row, settings, *, function: str, bias_name: str, bias_p: dict | None) -> np.ndarray:
    """f(q kᵀ · factor + b) / divisor · v over the visible keys of the query's chunk, or also of those that touch it."""
    chunk, overlap = settings.chunks.size, int(settings.chunks.overlapping)
    span = chunk * (1 + overlap * (1 if settings.causal else 2))
    bias = relative_bias(bias_name, chunk * (1 + overlap), settings.causal, bias_p)
    start = lambda t: (t // chunk - overlap) * chunk
    return attend(
        q,
        k,
        v,
        lambda t, u: abs(t // chunk - u // chunk) <= overlap and row.sees(t, u),
        function=function,
        factor=normalizers.score_factor(settings, function, q.shape[1], span),
        divisor=lambda visible: normalizers.local(settings, visible, span),
        # Places near the chunk, which for a bias of the distance alone are as good as places in the row.
        bias=lambda t, u: bias(t - start(t), u - start(t)),
    )


def global_part(q, k, v, row: Row, settings) -> np.ndarray:
    """Causal: Σ (q_t·k_u) v_u / N over the visible u of earlier chunks. Bidirectional: over the whole document."""
    out_LxE = np.zeros_like(v)
    for t in range(len(q)):
        earlier = lambda u, t=t: u // settings.chunks.size < t // settings.chunks.size
        seen = [u for u in range(len(k)) if row.sees(t, u) and (not settings.causal or earlier(u))]
        for u in seen:
            n = normalizers.linear(settings, len(seen), len(q))
            out_LxE[t] += (q[t] @ k[u]) * v[u] / n
    return out_LxE


def _mix(pairs: list, v: np.ndarray, row: Row, settings, **local) -> np.ndarray:
    """The sum of the parts that are on; `pairs` holds q, k of each of them."""
    pairs, out = list(pairs), np.zeros_like(v)
    if settings.chunks.local_attention:
        out += local_part(*pairs.pop(0), v, row, settings, **local)
    if settings.chunks.global_attention:
        out += global_part(*pairs.pop(0), v, row, settings)
    assert not pairs, "more queries and keys than parts"
    return out


def gau_mixed_chunk(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """O = (U ⊙ (V^quad + V^lin)) W_o."""
    bias = {"bias_name": settings.gau.relative_bias, "bias_p": p["core"].get("bias")}

    def mix(variants: list[np.ndarray], v: np.ndarray) -> np.ndarray:
        pairs = zip(variants[::2], variants[1::2], strict=True)
        return _mix(pairs, v, row, settings, function=settings.gau.attention_function, **bias)

    return gated_unit(x_LxD, p, row, settings, mix)


def softmax_mixed_chunk(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """MC-TFM: each head scales and offsets its queries and keys for the two parts; softmax inside the chunk."""
    q, k, v = (heads(mapped(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value"))

    def variants(x_LxK: np.ndarray, p: dict, h: int) -> list[np.ndarray]:
        return [
            rotated(x_LxK * scale[h] + offset[h], row, settings)
            for scale, offset in zip(p["scale"], p["offset"], strict=True)
        ]

    outs = []
    for h in range(settings.num_heads):
        queries, keys = variants(q[h], p["query_variants"], h), variants(k[h], p["key_variants"], h)
        pairs = zip(queries, keys, strict=True)
        outs.append(_mix(pairs, v[h], row, settings, function="softmax", bias_name="none", bias_p=None))
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]
