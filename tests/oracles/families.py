"""The families as the design document has them; a family of the library without a row here fails its tests."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

from oracles.aft import aft_conv, aft_full, aft_local, aft_simple
from oracles.attention import gau_quadratic, softmax_attention
from oracles.based import taylor_attention
from oracles.conformer import closing_half_step, convolution_module, half_step
from oracles.cosformer import cosine_attention
from oracles.delta import gated_delta
from oracles.feed_forward import glu, mlp
from oracles.flow import flow_attention
from oracles.gated_linear import gated_linear
from oracles.linear import favor_attention, linear_attention
from oracles.linformer import linformer_attention
from oracles.log_sparse import log_sparse_attention, log_sparse_pairs
from oracles.long_short import long_short_attention
from oracles.lsh import lsh_attention, lsh_pairs
from oracles.mega import mega
from oracles.mixed_chunks import gau_mixed_chunk, softmax_mixed_chunk
from oracles.nystrom import nystrom_attention
from oracles.retention import retention
from oracles.rwkv import channel_mix, time_mix
from oracles.ssd import state_space
from oracles.transformer_xl import segment_attention, segment_pairs
from oracles.windows import adaptive_span_attention, adaptive_span_pairs, longformer_attention, longformer_pairs


class Family(NamedTuple):
    """One row.

    Attributes:
        sublayers: of a layer: (x_LxD, parameters, row, settings) -> y_LxD.
        absolute: the default of absolute_positions.
        rotary: the default of rotary.
        bias: whether there is a relative bias by default.
        constant_state: whether decoding takes the same memory whatever the length.
        normalizes: whether a part without softmax needs `normalizer`.
        connects: the arguments of the first sublayer -> L×L of bool, whether it has a weight from t to u; None:
            wherever t sees u.
    """

    sublayers: tuple[Callable, ...]
    absolute: str
    rotary: bool
    bias: bool = False
    constant_state: bool = False
    normalizes: bool = False
    connects: Callable | None = None


FAMILIES = {
    "transformer": Family((softmax_attention, mlp), "learned", False),
    "transformer_plus": Family((softmax_attention, mlp), "none", True),
    "transformer_plus_plus": Family((softmax_attention, glu), "none", True),
    "flash_quad": Family((gau_quadratic, gau_quadratic), "scaled_sinusoid", True, bias=True, normalizes=True),
    "flash": Family(
        (gau_mixed_chunk, gau_mixed_chunk), "scaled_sinusoid", True, bias=True, constant_state=True, normalizes=True
    ),
    "mc_tfm": Family((softmax_mixed_chunk, glu), "none", True, constant_state=True, normalizes=True),
    "aft_full": Family((aft_full, mlp), "learned", False),
    "aft_local": Family((aft_local, mlp), "learned", False, constant_state=True),
    "aft_simple": Family((aft_simple, mlp), "learned", False, constant_state=True),
    "aft_conv": Family((aft_conv, mlp), "learned", False, constant_state=True),
    "linear_transformer": Family((linear_attention, mlp), "learned", False, constant_state=True),
    "cosformer": Family((cosine_attention, mlp), "learned", False, constant_state=True),
    "flowformer": Family((flow_attention, mlp), "learned", False, constant_state=True),
    "performer": Family((favor_attention, mlp), "learned", False, constant_state=True),
    "longformer": Family((longformer_attention, mlp), "none", True, constant_state=True, connects=longformer_pairs),
    "log_sparse": Family((log_sparse_attention, mlp), "learned", False, connects=log_sparse_pairs),
    "adaptive_span": Family(
        (adaptive_span_attention, mlp), "none", True, constant_state=True, connects=adaptive_span_pairs
    ),
    "transformer_xl": Family((segment_attention, mlp), "none", False, constant_state=True, connects=segment_pairs),
    "retnet": Family((retention, mlp), "none", True, constant_state=True),
    "mamba2": Family((state_space, state_space), "none", False, constant_state=True),
    "gated_deltanet": Family((gated_delta, glu), "none", False, constant_state=True),
    "gla": Family((gated_linear, glu), "none", False, constant_state=True),
    "based": Family((taylor_attention, glu), "learned", False, constant_state=True),
    "mega": Family((mega, mlp), "none", False, constant_state=True),
    "rwkv4": Family((time_mix, channel_mix), "none", False, constant_state=True),
    "conformer": Family((half_step, softmax_attention, convolution_module, closing_half_step), "none", True),
    "lite_transformer": Family((long_short_attention, mlp), "learned", False),
    "linformer": Family((linformer_attention, mlp), "learned", False),
    "nystromformer": Family((nystrom_attention, mlp), "learned", False),
    "reformer": Family((lsh_attention, mlp), "learned", False, connects=lsh_pairs),
}


OWN_RESIDUAL = {mega, closing_half_step}  # sublayers that get the residual stream and return what replaces it


def complete(model: dict) -> SimpleNamespace:
    """The settings of `config.model`, its sections as namespaces, with every open key (None) at its family's default.

    Toeplitz biases reach max_length in FLASH-Quad, where above 512 rope takes over, and C in FLASH. Layer norm for
    language models, scale norm for bidirectional GAUs. N counts for causal models and is the length for others.
    `layers` has the settings of each layer of a pattern: its own, but for what the whole model shares.
    """
    s = SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in model.items()})
    family = FAMILIES[s.family]
    gau = family.sublayers[0] in (gau_quadratic, gau_mixed_chunk)
    quadratic_gau = family.sublayers[0] is gau_quadratic
    toeplitz = "rope" if quadratic_gau and s.max_length > 512 else "toeplitz"
    # 8D/3 rounded up to a multiple of 8
    glu_width = next(width for width in range(8, 8 * s.model_dim, 8) if 3 * width >= 8 * s.model_dim)
    mlp_width = 4 * s.model_dim
    if family.sublayers[0] in (aft_conv, lsh_attention):  # 4.5 D, since their keys take no D² parameters
        mlp_width = next(width for width in range(8, 8 * s.model_dim, 8) if 2 * width >= 9 * s.model_dim)
    if family.sublayers[0] in (retention, gated_delta, mega):
        mlp_width = 2 * s.model_dim
    if family.sublayers[0] in (time_mix, segment_attention):
        mlp_width = next(width for width in range(8, 8 * s.model_dim, 8) if 2 * width >= 7 * s.model_dim)
    if family.sublayers[0] is half_step:  # two of them
        mlp_width = next(width for width in range(8, 8 * s.model_dim, 8) if 4 * width >= 5 * s.model_dim)
    if family.sublayers[0] is long_short_attention:
        mlp_width = next(width for width in range(8, 8 * s.model_dim, 8) if 8 * width >= 41 * s.model_dim)
    if family.sublayers[0] is taylor_attention:  # the usual GLU's, and D / 2 for what narrow queries and keys leave
        glu_width = next(width for width in range(8, 8 * s.model_dim, 8) if 6 * width >= 19 * s.model_dim)
    # A unit whose queries and keys start near zero (normal γ) has only what relu² leaves of their products, and a
    # Laplace function if its 0.006 of a zero is divided by N; dense ones have it if N divides their products. One whose
    # maps are all small has small values anyway. Cross attention, which a layer has with an encoder, is not small.
    divides = s.divides or ("weights" if s.family == "flash_quad" else "scores")
    near_zero = s.gau.query_key != "dense" or divides == "scores"
    leaves_zero = s.gau.attention_function in (("relu2",) if divides == "scores" else ("relu2", "laplace"))
    low_scores = s.scale_init == "normal" and near_zero and leaves_zero
    starts_small = gau and s.encoder.family is None and (low_scores or s.init == "normal")
    width = s.model_dim // s.num_heads  # of a head, whose K ln K are rounded up to a multiple of 8
    features = next(count for count in range(8, 10_000, 8) if count >= width * math.log(width))
    taps = {log_sparse_attention: 3, state_space: 4 if s.causal else 7, gated_delta: 4}
    defaults = {
        "residual_init": "as_init" if starts_small else "depth",
        "mlp_dim": glu_width if family.sublayers[1] is glu and family.sublayers[0] is not gated_delta else mlp_width,
        "gau.expanded_dim": 2 * s.model_dim,
        "mega.expanded_dim": 2 * s.model_dim,
        "mega.shared_dim": 2 * max(1, s.model_dim // 8),
        "favor.features": features,
        "cosformer.cos_length": s.max_length,
        "ssd.expanded_dim": 2 * s.model_dim,
        "ssd.head_width": min(64, 2 * s.model_dim),
        "delta.key_dim": s.num_heads * math.ceil(3 * s.model_dim / 4 / s.num_heads),
        "gla.key_dim": s.num_heads * math.ceil(s.model_dim / 2 / s.num_heads),
        "delta.value_dim": s.num_heads * math.ceil(3 * s.model_dim / 2 / s.num_heads),
        "short_convolution": taps.get(family.sublayers[0], 0),
        "norm": "scale" if gau and not s.causal else "layer",
        "absolute_positions": family.absolute,
        "head": "softmax",
        "rotary": family.rotary,
        "num_kv_heads": s.num_heads,
        "state_dtype": s.dtype,
        "gau.relative_bias": toeplitz if family.bias else "none",
        "divides": divides,
        "normalizer": "count" if s.causal and divides == "weights" else str(s.max_length),
    }
    for key, value in defaults.items():
        *section, name = key.split(".")
        place = getattr(s, section[0]) if section else s
        if getattr(place, name) is None:
            setattr(place, name, value)
    shared = {key: getattr(s, key) for key in ("norm", "absolute_positions")}
    s.layers = [complete(model | shared | {"family": name, "pattern": ()}) for name in s.pattern] or [s]
    return s
