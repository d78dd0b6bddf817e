"""The parts of a layer, for the rows of the table of families: how each is built, and which keys it reads."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.adaptive_span import AdaptiveSpanAttention
from flash_lm.layers.aft import AFTCore, AFTOptions, AttentionFreeUnit, ConvCore, FactorisedCore
from flash_lm.layers.attention import GatedAttentionUnit, GAUOptions, MultiHeadAttention
from flash_lm.layers.conformer import ClosingHalfStep, ConformerOptions, ConvolutionModule, HalfStep
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.core import CoreOfPairs
from flash_lm.layers.cosformer_core import CosformerCore, CosformerOptions
from flash_lm.layers.favor_core import FavorCore, FavorOptions, default_features
from flash_lm.layers.feed_forward import GLU, MLP
from flash_lm.layers.flow_core import FlowCore, FlowOptions
from flash_lm.layers.gated_delta import DeltaOptions, GatedDeltaAttention
from flash_lm.layers.gated_linear import GatedLinearAttention, GLAOptions
from flash_lm.layers.linear_core import LinearCore, LinearOptions
from flash_lm.layers.linformer_core import LinformerCore, LinformerOptions
from flash_lm.layers.log_sparse import LogSparseAttention, LogSparseOptions
from flash_lm.layers.long_short import LiteOptions, LongShortAttention
from flash_lm.layers.longformer import LongformerAttention
from flash_lm.layers.lsh_core import LSHOptions
from flash_lm.layers.mega import MegaOptions, MegaUnit
from flash_lm.layers.mixed_chunk_core import ChunkOptions, MixedChunkCore
from flash_lm.layers.nystrom_core import NystromCore, NystromOptions
from flash_lm.layers.positions import relative_bias
from flash_lm.layers.quadratic_core import QuadraticCore, QuadraticOptions
from flash_lm.layers.reformer import ReformerAttention
from flash_lm.layers.retention import Retention, RetentionOptions
from flash_lm.layers.rwkv import ChannelMix, TimeMix
from flash_lm.layers.span_core import SpanCore, SpanOptions
from flash_lm.layers.ssd import SSDOptions, StateSpaceUnit
from flash_lm.layers.sublayer import Sublayer
from flash_lm.layers.taylor_core import BasedOptions, TaylorCore
from flash_lm.layers.transformer_xl import SegmentAttention, XLOptions
from flash_lm.layers.window_core import WindowOptions
from flash_lm.models.part import EVERYTHING, Part
from flash_lm.models.part_defaults import gated_residual_init, of_heads, times
from flash_lm.models.part_problems import (
    delta_problems,
    filter_problems,
    gau_problems,
    gla_problems,
    head_problems,
    log_sparse_problems,
    long_short_problems,
    mega_problems,
    segment_problems,
    softmax_problems,
    span_problems,
    ssd_problems,
    taylor_problems,
    width_problems,
    window_problems,
)
from flash_lm.ops.linear_attention import elu_plus_one


def _heads_over(core: Callable[..., CoreOfPairs], *, draws: bool = False) -> Callable[..., Sublayer]:
    """Builds multi-head attention over `core(*sections, config)`, with short convolutions.

    Args:
        core: the type of the core.
        draws: whether it takes `rngs`.
    """

    def build(config: ModelConfig, *sections: Any, rngs: nnx.Rngs) -> Sublayer:
        *own, convolution = sections
        mixing = core(*own, config, rngs=rngs) if draws else core(*own, config)
        return MultiHeadAttention(mixing, config, rngs=rngs, convolution=convolution)

    return build


def _softmax(
    config: ModelConfig, quadratic: QuadraticOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    core = QuadraticCore("softmax", None, quadratic, config)
    return MultiHeadAttention(core, config, rngs=rngs, key_heads=config.num_kv_heads, convolution=convolution)


def _gau_quadratic(config: ModelConfig, gau: GAUOptions, quadratic: QuadraticOptions, *, rngs: nnx.Rngs) -> Sublayer:
    bias = relative_bias(gau.relative_bias, gau.shared_dim, config, rngs=rngs)
    return GatedAttentionUnit(QuadraticCore(gau.attention_function, bias, quadratic, config), gau, config, rngs=rngs)


def _gau_mixed_chunk(config: ModelConfig, gau: GAUOptions, chunks: ChunkOptions, *, rngs: nnx.Rngs) -> Sublayer:
    bias = relative_bias(gau.relative_bias, gau.shared_dim, config, rngs=rngs)
    return GatedAttentionUnit(MixedChunkCore(gau.attention_function, bias, chunks, config), gau, config, rngs=rngs)


def _mega(config: ModelConfig, mega: MegaOptions, chunks: ChunkOptions, *, rngs: nnx.Rngs) -> Sublayer:
    bias = relative_bias(mega.relative_bias, mega.shared_dim, config, rngs=rngs)
    own = dataclasses.replace(chunks, local_attention=True, global_attention=False)
    return MegaUnit(MixedChunkCore(mega.attention_function, bias, own, config), mega, config, rngs=rngs)


def _softmax_mixed_chunk(
    config: ModelConfig, chunks: ChunkOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    core = MixedChunkCore("softmax", None, chunks, config)
    return MultiHeadAttention(core, config, rngs=rngs, scale_offsets=True, convolution=convolution)


def _aft_full(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(FactorisedCore(None, aft, config, rngs=rngs), config, rngs=rngs, convolution=convolution)


def _aft_local(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(
        FactorisedCore(aft.window, aft, config, rngs=rngs), config, rngs=rngs, convolution=convolution
    )


def _aft_simple(config: ModelConfig, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(AFTCore(config), config, rngs=rngs, convolution=convolution)


def _aft_conv(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(ConvCore(aft, config, rngs=rngs), config, rngs=rngs, convolution=convolution)


def _window(config: ModelConfig, window: WindowOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return LongformerAttention(window, config, rngs=rngs, convolution=convolution)


def _span(config: ModelConfig, span: SpanOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AdaptiveSpanAttention(SpanCore(span, config), config, rngs=rngs, convolution=convolution)


def _log_sparse(config: ModelConfig, log_sparse: LogSparseOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return LogSparseAttention(log_sparse, config, rngs=rngs)


def _lsh(config: ModelConfig, lsh: LSHOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return ReformerAttention(lsh, config, rngs=rngs, convolution=convolution)


def _segments(config: ModelConfig, xl: XLOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return SegmentAttention(xl, config, rngs=rngs)


def _retention(
    config: ModelConfig,
    retention: RetentionOptions,
    linear: LinearOptions,
    convolution: ConvolutionOptions,
    *,
    rngs: nnx.Rngs,
) -> Sublayer:
    return Retention(retention, linear, convolution, config, rngs=rngs)


def _ssd(config: ModelConfig, ssd: SSDOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return StateSpaceUnit(ssd, config, rngs=rngs)


def _delta(config: ModelConfig, delta: DeltaOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return GatedDeltaAttention(delta, config, rngs=rngs)


def _gla(
    config: ModelConfig, gla: GLAOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return GatedLinearAttention(gla, linear, convolution, config, rngs=rngs)


def _time_mix(config: ModelConfig, linear: LinearOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return TimeMix(linear, config, rngs=rngs)


def _taylor(
    config: ModelConfig, based: BasedOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    core = TaylorCore(linear, config)
    return MultiHeadAttention(core, config, rngs=rngs, key_width=based.feature_dim, convolution=convolution)


def _convolution_module(config: ModelConfig, conformer: ConformerOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return ConvolutionModule(conformer, config, rngs=rngs)


def _long_short(config: ModelConfig, lite: LiteOptions, quadratic: QuadraticOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return LongShortAttention(lite, quadratic, config, rngs=rngs)


_HEADS = frozenset({"num_heads", "rotary", "rotary_base"})
_MULTI_HEAD = _HEADS | {"query_key_norm"}
_WHOLE_ROWS = frozenset({"bidirectional"})
_GAU_DEFAULTS = {"gau.expanded_dim": times(2), "residual_init": gated_residual_init}
_GAU: dict[str, Any] = {"problems": gau_problems, "defaults": _GAU_DEFAULTS}
_GAU_KEYS = frozenset({"rotary", "rotary_base", "normalizer", "divides", "scale_init", "kernels"})

MLP_PART = Part(MLP, keys=frozenset({"mlp_dim"}), defaults={"mlp_dim": times(4)}, serves=EVERYTHING)
# Two thirds of an MLP's width, so that three matrices have as many parameters as two.
GLU_PART = Part(GLU, keys=frozenset({"mlp_dim"}), defaults={"mlp_dim": times(8, 3)}, serves=EVERYTHING)
SOFTMAX = Part(
    _softmax,
    (QuadraticOptions, ConvolutionOptions),
    _MULTI_HEAD | {"num_kv_heads"},
    defaults={"num_kv_heads": lambda config: config.num_heads},
    problems=softmax_problems,
    serves=EVERYTHING,
)
GAU_QUADRATIC = Part(_gau_quadratic, (GAUOptions, QuadraticOptions), _GAU_KEYS, serves=EVERYTHING, **_GAU)
GAU_MIXED_CHUNK = Part(_gau_mixed_chunk, (GAUOptions, ChunkOptions), _GAU_KEYS, **_GAU)
MEGA = Part(
    _mega,
    (MegaOptions, ChunkOptions),
    _GAU_KEYS,
    unread=frozenset({"chunks.local_attention", "chunks.global_attention", "short_convolution"}),
    defaults={"mega.expanded_dim": times(2), "mega.shared_dim": lambda config: max(2, config.model_dim // 8 * 2)},
    problems=mega_problems,
)
SOFTMAX_MIXED_CHUNK = Part(
    _softmax_mixed_chunk,
    (ChunkOptions, ConvolutionOptions),
    _MULTI_HEAD | {"normalizer", "divides"},
    problems=head_problems,
)
LINEAR = Part(
    _heads_over(functools.partial(LinearCore, elu_plus_one)),
    (LinearOptions, ConvolutionOptions),
    _MULTI_HEAD | {"kernels"},
    problems=head_problems,
    serves=EVERYTHING,
)
FAVOR = Part(
    _heads_over(FavorCore, draws=True),
    (FavorOptions, LinearOptions, ConvolutionOptions),
    _MULTI_HEAD,
    defaults={"favor.features": default_features},
    problems=head_problems,
)
WINDOW = Part(_window, (WindowOptions, ConvolutionOptions), _MULTI_HEAD, problems=window_problems)
SPAN = Part(_span, (SpanOptions, ConvolutionOptions), _MULTI_HEAD, problems=span_problems)
LOG_SPARSE = Part(
    _log_sparse,
    (LogSparseOptions,),
    _MULTI_HEAD,
    defaults={"short_convolution": 3},
    problems=log_sparse_problems,
)
LSH = Part(_lsh, (LSHOptions, ConvolutionOptions), frozenset({"num_heads"}), problems=width_problems)
COSINE = Part(
    _heads_over(CosformerCore),
    (CosformerOptions, LinearOptions, ConvolutionOptions),
    _MULTI_HEAD | {"kernels"},
    defaults={"cosformer.cos_length": lambda config: config.max_length},
    problems=head_problems,
)
FLOW = Part(
    _heads_over(FlowCore), (FlowOptions, LinearOptions, ConvolutionOptions), _MULTI_HEAD, problems=head_problems
)
SLOTS = Part(
    _heads_over(LinformerCore, draws=True),
    (LinformerOptions, ConvolutionOptions),
    _MULTI_HEAD,
    problems=head_problems,
    serves=_WHOLE_ROWS,
)
NYSTROM = Part(
    _heads_over(NystromCore, draws=True),
    (NystromOptions, ConvolutionOptions),
    _MULTI_HEAD,
    problems=head_problems,
    serves=_WHOLE_ROWS,
)
SEGMENTS = Part(
    _segments,
    (XLOptions,),
    frozenset({"num_heads"}),
    problems=segment_problems,
)
RETENTION = Part(
    _retention,
    (RetentionOptions, LinearOptions, ConvolutionOptions),
    _HEADS | {"kernels"},
    problems=head_problems,
)
SSD = Part(
    _ssd,
    (SSDOptions,),
    frozenset({"kernels"}),
    defaults={
        "ssd.expanded_dim": times(2),
        "ssd.head_width": lambda config: min(64, config[SSDOptions].expanded_dim),
        "short_convolution": lambda config: 4 if config.causal else 7,
    },
    problems=ssd_problems,
)
DELTA = Part(
    _delta,
    (DeltaOptions,),
    frozenset({"num_heads"}),
    defaults={"delta.key_dim": of_heads(3, 4), "delta.value_dim": of_heads(3, 2), "short_convolution": 4},
    problems=delta_problems,
)
GLA = Part(
    _gla,
    (GLAOptions, LinearOptions, ConvolutionOptions),
    frozenset({"num_heads"}),
    defaults={"gla.key_dim": of_heads(1, 2)},
    problems=gla_problems,
)
TAYLOR = Part(
    _taylor,
    (BasedOptions, LinearOptions, ConvolutionOptions),
    _MULTI_HEAD | {"kernels"},
    problems=taylor_problems,
)
TIME_MIX = Part(_time_mix, (LinearOptions,), unread=frozenset({"short_convolution"}))
# A third matrix of D² parameters leaves 7 D² of a layer's 12 to the other two.
CHANNEL_MIX = Part(ChannelMix, keys=frozenset({"mlp_dim"}), defaults={"mlp_dim": times(7, 2)})
_HALF: dict[str, Any] = {"keys": frozenset({"mlp_dim"}), "defaults": {"mlp_dim": times(5, 4)}}
HALF_STEP = Part(HalfStep, **_HALF)
CONVOLUTION_MODULE = Part(_convolution_module, (ConformerOptions,))
CLOSING_HALF_STEP = Part(ClosingHalfStep, **_HALF)
LONG_SHORT = Part(_long_short, (LiteOptions, QuadraticOptions), _MULTI_HEAD, problems=long_short_problems)
AFT_FULL = Part(_aft_full, (AFTOptions, ConvolutionOptions), unread=frozenset({"aft.window"}))
AFT_LOCAL = Part(_aft_local, (AFTOptions, ConvolutionOptions))
AFT_SIMPLE = Part(_aft_simple, (ConvolutionOptions,))
AFT_CONV = Part(
    _aft_conv,
    (AFTOptions, ConvolutionOptions),
    frozenset({"num_heads"}),
    unread=frozenset({"aft.bias_dim", "aft.bias_rate"}),
    problems=filter_problems,
)
