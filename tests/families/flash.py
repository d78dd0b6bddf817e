"""FLASH-Quad, FLASH and MC-TFM: gated units and mixed chunk attention (Hua et al. 2022, sections 2 and 3.2)."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from oracles import counting, normalizers
from oracles.attention import Row, apply_rotary, attend, silu, split_heads
from oracles.convolution import project
from oracles.feed_forward import GLU
from oracles.mixed_chunks import global_part, local_part
from oracles.positions import relative_bias
from oracles.row import Family, Sublayer


def gated_unit(x_LxD: np.ndarray, p: dict, row: Row, settings, mix: Callable) -> np.ndarray:
    """(U ⊙ concat(mix(variants_h, V_h))) W_o.

    The variants of a head are its queries and keys: q, k of the first part, then q, k of the second.
    """
    u_LxE, v_LxE = (silu(project(x_LxD, p, name, row, settings)) for name in ("gate", "value"))
    mixed = []
    for h, v in enumerate(split_heads(v_LxE, settings.gau.heads)):
        mixed.append(mix([apply_rotary(x, row, settings) for x in _variants(x_LxD, p, h, row, settings)], v))
    return (u_LxE * np.concatenate(mixed, axis=1)) @ p["output"]["kernel"]


def _variants(x_LxD: np.ndarray, p: dict, h: int, row: Row, settings) -> list[np.ndarray]:
    """Variants of head h: Z ⊙ γ_i + β_i, with one shared Z, or one Z_i each if dense."""
    count, width = settings.gau.heads, settings.gau.shared_dim
    z_LxS = silu(project(x_LxD, p, "shared", row, settings))
    scales, offsets = (p["variants"][name].reshape(-1, count, width) for name in ("scale", "offset"))
    zs = [z_LxS] * len(scales)
    if settings.gau.query_key == "dense":
        zs = split_heads(split_heads(z_LxS, count)[h], len(scales))
    return [z * scale + offset for z, scale, offset in zip(zs, scales[:, h], offsets[:, h], strict=True)]


def gau_quadratic(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(U ⊙ f(q kᵀ · factor + b) / divisor · V) W_o."""
    length, function = len(x_LxD), settings.gau.attention_function
    n = normalizers.sequence_length_divisor(settings, length)

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


def _mix(pairs: list, v: np.ndarray, row: Row, settings, **local) -> np.ndarray:
    """Sums the enabled parts; `pairs` holds the q, k of each."""
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
    q, k, v = (
        split_heads(project(x_LxD, p, name, row, settings), settings.num_heads) for name in ("query", "key", "value")
    )

    def variants(x_LxK: np.ndarray, p: dict, h: int) -> list[np.ndarray]:
        return [
            apply_rotary(x_LxK * scale[h] + offset[h], row, settings)
            for scale, offset in zip(p["scale"], p["offset"], strict=True)
        ]

    outs = []
    for h in range(settings.num_heads):
        queries, keys = variants(q[h], p["query_variants"], h), variants(k[h], p["key_variants"], h)
        pairs = zip(queries, keys, strict=True)
        outs.append(_mix(pairs, v[h], row, settings, function="softmax", bias_name="none", bias_p=None))
    return np.concatenate(outs, axis=1) @ p["output"]["kernel"]


def _count_variants(s: SimpleNamespace, parts: int) -> int:
    """Number of queries and keys: one of each per head and part."""
    return 2 * parts * s.gau.heads


def _shared_width(s: SimpleNamespace, parts: int) -> int:
    """Width of Z, or of all Z_i if dense."""
    return s.gau.shared_dim * (_count_variants(s, parts) if s.gau.query_key == "dense" else 1)


def _unit(s: SimpleNamespace, parts: int) -> int:
    """Parameters: linear maps, and a scale and an offset per query and key."""
    maps = s.model_dim * (3 * s.gau.expanded_dim + _shared_width(s, parts))
    return maps + 2 * _count_variants(s, parts) * s.gau.shared_dim


def _unit_flops(s: SimpleNamespace, length: int, parts: int) -> int:
    return 2 * length * s.model_dim * (3 * s.gau.expanded_dim + _shared_width(s, parts))


def _parts(s: SimpleNamespace) -> int:
    return s.chunks.local_attention + s.chunks.global_attention


def _local_bias(s: SimpleNamespace) -> int:
    return (
        counting.bias_parameters(s.gau, s.chunks.size * (1 + s.chunks.overlapping)) if s.chunks.local_attention else 0
    )


def _chunk_flops(s: SimpleNamespace, length: int, width_of_pair: int, width_of_sums: int) -> int:
    """FLOPs of the pairs of the local part, and of the sums of the global part."""
    chunk = lambda t: t // s.chunks.size
    inside = sum(abs(chunk(t) - chunk(u)) <= s.chunks.overlapping for t, u in counting.visible_pairs(s, length))
    sums = counting.count_sum_accesses(s, length, s.chunks.size)
    return 2 * (s.chunks.local_attention * inside * width_of_pair + s.chunks.global_attention * sums * width_of_sums)


def _head_flops(s: SimpleNamespace, length: int) -> int:
    width = s.model_dim // s.num_heads
    sums = s.num_heads * width * width
    return 2 * length * 4 * s.model_dim**2 + _chunk_flops(s, length, 2 * s.model_dim, sums)


GAU_QUADRATIC = Sublayer(
    gau_quadratic,
    lambda s: _unit(s, 1) + counting.bias_parameters(s.gau, s.max_length),
    lambda s, length: (
        _unit_flops(s, length, 1)
        + 2 * len(counting.visible_pairs(s, length)) * (s.gau.heads * s.gau.shared_dim + s.gau.expanded_dim)
    ),
    lambda s: s.gau.expanded_dim + _shared_width(s, 1),
)
GAU_MIXED_CHUNK = Sublayer(
    gau_mixed_chunk,
    lambda s: _unit(s, _parts(s)) + _local_bias(s),
    lambda s, length: (
        _unit_flops(s, length, _parts(s))
        + _chunk_flops(
            s,
            length,
            s.gau.heads * s.gau.shared_dim + s.gau.expanded_dim,
            s.gau.shared_dim * s.gau.expanded_dim,
        )
    ),
    lambda s: s.gau.expanded_dim + _shared_width(s, _parts(s)),
)
SOFTMAX_MIXED_CHUNK = Sublayer(
    softmax_mixed_chunk,
    lambda s: 4 * s.model_dim**2 + 4 * s.model_dim * _parts(s),
    _head_flops,
    lambda s: 3 * s.model_dim,
)


def _residual_init(s: SimpleNamespace) -> str:
    """Default of residual_init: "as_init" where a new unit adds so little that its output needs no smaller start.

    Queries and keys that start near zero (normal γ) have tiny weights under relu², and under Laplace's function, which
    is 0.006 at zero, if N divides the weights. Dense ones have them if N divides the scores. A unit whose maps all
    start small has small values anyway. Cross attention, in each layer of a model with an encoder, is not small.
    """
    near_zero = s.gau.query_key != "dense" or s.divides == "scores"
    leaves_zero = s.gau.attention_function in (("relu2",) if s.divides == "scores" else ("relu2", "laplace"))
    low_scores = s.scale_init == "normal" and near_zero and leaves_zero
    return "as_init" if s.encoder.family is None and (low_scores or s.init == "normal") else "depth"


_UNITS = {
    "gau.expanded_dim": lambda s: 2 * s.model_dim,
    "norm": lambda s: "layer" if s.causal else "scale",
    "residual_init": _residual_init,
}
_CHUNKED = {
    "constant_state": True,
    "reads_normalizer": True,
    "one_pass": True,
    "without_segments": True,
    "growth": "linear",
}
_SMALL = {"gau.shared_dim": 8, "chunks.size": 8}
_SIZES = ({"gau.shared_dim": 8, "chunks.size": 16}, {"gau.shared_dim": 10, "chunks.size": 12})
_XLA_KEYS = {"gau.shared_dim": 128, "chunks.size": 128}
ROWS = {
    "flash_quad": Family(
        (GAU_QUADRATIC, GAU_QUADRATIC),
        absolute="scaled_sinusoid",
        rotary=True,
        # The default bias is Toeplitz up to max_length 512, then rope.
        defaults=_UNITS
        | {"divides": "weights", "gau.relative_bias": lambda s: "rope" if s.max_length > 512 else "toeplitz"},
        small=_SMALL,
        letters=lambda s: {"E": 2 * s.model_dim, "S": s.gau.shared_dim},
        sizes=_SIZES,
        xla_keys=_XLA_KEYS,
        serves_prefix=True,
        kernels=(True, False),
        reads_normalizer=True,
        limits_length=True,
        growth="memory",
    ),
    "flash": Family(
        (GAU_MIXED_CHUNK, GAU_MIXED_CHUNK),
        absolute="scaled_sinusoid",
        rotary=True,
        defaults=_UNITS | {"gau.relative_bias": "toeplitz"},
        small=_SMALL,
        letters=lambda s: {"E": 2 * s.model_dim, "S": s.gau.shared_dim, "C": s.chunks.size},
        sizes=_SIZES,
        xla_keys=_XLA_KEYS,
        both_ways=True,
        kernels=(True, False),
        # relu² has derivative zero at negative scores. A bias of the distance can make the scores of all pairs at one
        # distance negative, so many pairs of a chunk get no gradient; Laplace's function has one everywhere.
        smooth_keys={"gau.attention_function": "laplace"},
        **_CHUNKED,
    ),
    "mc_tfm": Family((SOFTMAX_MIXED_CHUNK, GLU), rotary=True, small=_SMALL, xla_keys=_XLA_KEYS, **_CHUNKED),
}
