"""The parts of a layer, for the rows of the table of families: how each is built, and which keys it reads."""

from typing import Any

from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.adaptive_span import AdaptiveSpanAttention
from flash_lm.layers.aft import AFTCore, AFTOptions, AttentionFreeUnit, ConvCore, FactorisedCore
from flash_lm.layers.attention import GatedAttentionUnit, GAUOptions, MultiHeadAttention
from flash_lm.layers.conformer import ClosingHalfStep, ConformerOptions, ConvolutionModule, HalfStep
from flash_lm.layers.convolution import ConvolutionOptions
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
from flash_lm.layers.span_core import SpanOptions
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


def _softmax(
    config: ModelConfig, quadratic: QuadraticOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    core = QuadraticCore(config, quadratic)
    return MultiHeadAttention(config, core, convolution, rngs=rngs, key_heads=config.num_kv_heads)


def _gau_quadratic(config: ModelConfig, gau: GAUOptions, quadratic: QuadraticOptions, *, rngs: nnx.Rngs) -> Sublayer:
    bias = relative_bias(gau.relative_bias, gau.shared_dim, config, rngs=rngs)
    core = QuadraticCore(config, quadratic, gau.attention_function, bias)
    return GatedAttentionUnit(config, gau, core, rngs=rngs)


def _gau_mixed_chunk(config: ModelConfig, gau: GAUOptions, chunks: ChunkOptions, *, rngs: nnx.Rngs) -> Sublayer:
    bias = relative_bias(gau.relative_bias, gau.shared_dim, config, rngs=rngs)
    core = MixedChunkCore(config, chunks, gau.attention_function, bias)
    return GatedAttentionUnit(config, gau, core, rngs=rngs)


def _softmax_mixed_chunk(
    config: ModelConfig, chunks: ChunkOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    core = MixedChunkCore(config, chunks)
    return MultiHeadAttention(config, core, convolution, rngs=rngs, scale_offsets=True)


def _aft_full(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, FactorisedCore(config, aft, None, rngs=rngs), convolution, rngs=rngs)


def _aft_local(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, FactorisedCore(config, aft, aft.window, rngs=rngs), convolution, rngs=rngs)


def _aft_simple(config: ModelConfig, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, AFTCore(config), convolution, rngs=rngs)


def _aft_conv(config: ModelConfig, aft: AFTOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return AttentionFreeUnit(config, ConvCore(config, aft, rngs=rngs), convolution, rngs=rngs)


def _linear(config: ModelConfig, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs) -> Sublayer:
    return MultiHeadAttention(config, LinearCore(config, linear, elu_plus_one), convolution, rngs=rngs)


def _favor(
    config: ModelConfig, favor: FavorOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, FavorCore(config, favor, linear, rngs=rngs), convolution, rngs=rngs)


def _cosine(
    config: ModelConfig,
    cosformer: CosformerOptions,
    linear: LinearOptions,
    convolution: ConvolutionOptions,
    *,
    rngs: nnx.Rngs,
) -> Sublayer:
    return MultiHeadAttention(config, CosformerCore(config, cosformer, linear), convolution, rngs=rngs)


def _flow(
    config: ModelConfig, flow: FlowOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, FlowCore(config, flow, linear), convolution, rngs=rngs)


def _slots(
    config: ModelConfig, linformer: LinformerOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, LinformerCore(config, linformer, rngs=rngs), convolution, rngs=rngs)


def _nystrom(
    config: ModelConfig, nystrom: NystromOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, NystromCore(config, nystrom, rngs=rngs), convolution, rngs=rngs)


def _taylor(
    config: ModelConfig, based: BasedOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, TaylorCore(config, linear), convolution, rngs=rngs, key_width=based.feature_dim)


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
    MegaUnit,
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
    _linear,
    (LinearOptions, ConvolutionOptions),
    _MULTI_HEAD | {"kernels"},
    problems=head_problems,
    serves=EVERYTHING,
)
FAVOR = Part(
    _favor,
    (FavorOptions, LinearOptions, ConvolutionOptions),
    _MULTI_HEAD,
    defaults={"favor.features": default_features},
    problems=head_problems,
)
WINDOW = Part(LongformerAttention, (WindowOptions, ConvolutionOptions), _MULTI_HEAD, problems=window_problems)
SPAN = Part(AdaptiveSpanAttention, (SpanOptions, ConvolutionOptions), _MULTI_HEAD, problems=span_problems)
LOG_SPARSE = Part(
    LogSparseAttention,
    (LogSparseOptions,),
    _MULTI_HEAD,
    defaults={"short_convolution": 3},
    problems=log_sparse_problems,
)
LSH = Part(ReformerAttention, (LSHOptions, ConvolutionOptions), frozenset({"num_heads"}), problems=width_problems)
COSINE = Part(
    _cosine,
    (CosformerOptions, LinearOptions, ConvolutionOptions),
    _MULTI_HEAD | {"kernels"},
    defaults={"cosformer.cos_length": lambda config: config.max_length},
    problems=head_problems,
)
FLOW = Part(_flow, (FlowOptions, LinearOptions, ConvolutionOptions), _MULTI_HEAD, problems=head_problems)
SLOTS = Part(
    _slots,
    (LinformerOptions, ConvolutionOptions),
    _MULTI_HEAD,
    problems=head_problems,
    serves=_WHOLE_ROWS,
)
NYSTROM = Part(
    _nystrom,
    (NystromOptions, ConvolutionOptions),
    _MULTI_HEAD,
    problems=head_problems,
    serves=_WHOLE_ROWS,
)
SEGMENTS = Part(
    SegmentAttention,
    (XLOptions,),
    frozenset({"num_heads"}),
    problems=segment_problems,
)
RETENTION = Part(
    Retention,
    (RetentionOptions, LinearOptions, ConvolutionOptions),
    _HEADS | {"kernels"},
    problems=head_problems,
)
SSD = Part(
    StateSpaceUnit,
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
    GatedDeltaAttention,
    (DeltaOptions,),
    frozenset({"num_heads"}),
    defaults={"delta.key_dim": of_heads(3, 4), "delta.value_dim": of_heads(3, 2), "short_convolution": 4},
    problems=delta_problems,
)
GLA = Part(
    GatedLinearAttention,
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
TIME_MIX = Part(TimeMix, (LinearOptions,), unread=frozenset({"short_convolution"}))
# A third matrix of D² parameters leaves 7 D² of a layer's 12 to the other two.
CHANNEL_MIX = Part(ChannelMix, keys=frozenset({"mlp_dim"}), defaults={"mlp_dim": times(7, 2)})
_HALF: dict[str, Any] = {"keys": frozenset({"mlp_dim"}), "defaults": {"mlp_dim": times(5, 4)}}
HALF_STEP = Part(HalfStep, **_HALF)
CONVOLUTION_MODULE = Part(ConvolutionModule, (ConformerOptions,))
CLOSING_HALF_STEP = Part(ClosingHalfStep, **_HALF)
LONG_SHORT = Part(LongShortAttention, (LiteOptions, QuadraticOptions), _MULTI_HEAD, problems=long_short_problems)
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
