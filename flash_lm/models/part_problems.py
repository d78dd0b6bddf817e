"""Why a part of a layer cannot be built from a complete config: a sentence for each reason."""

from collections.abc import Mapping

from flash_lm.config.model import ModelConfig
from flash_lm.layers.aft import AFTOptions
from flash_lm.layers.attention import GAUOptions
from flash_lm.layers.gated_delta import DeltaOptions
from flash_lm.layers.gated_linear import GLAOptions
from flash_lm.layers.log_sparse import LogSparseOptions
from flash_lm.layers.long_short import LiteOptions
from flash_lm.layers.mega import MegaOptions
from flash_lm.layers.span_core import SpanOptions
from flash_lm.layers.ssd import SSDOptions
from flash_lm.layers.taylor_core import BasedOptions
from flash_lm.layers.window_core import WindowOptions


def long_short_problems(config: ModelConfig) -> list[str]:
    """Of attention beside convolution."""
    found, lite, heads = head_problems(config), config[LiteOptions], config.num_heads
    if not 0 < lite.attending(heads) < heads:
        found.append(
            f"model.lite.attention_share={lite.attention_share} of model.num_heads={heads} must leave a head or more "
            "to the attention and to the convolution"
        )
    return found


def taylor_problems(config: ModelConfig) -> list[str]:
    """Of Taylor features."""
    found, width = width_problems(config), config[BasedOptions].feature_dim
    if config.rotary and width % 2:
        found.append(f"model.rotary pairs dimensions: model.based.feature_dim={width} must be even")
    return found


def delta_problems(config: ModelConfig) -> list[str]:
    """Of the gated delta rule."""
    delta = config[DeltaOptions]
    widths = {"model.delta.key_dim": delta.key_dim, "model.delta.value_dim": delta.value_dim}
    return _uneven_heads(widths, config) + _one_way_problems(config)


def gla_problems(config: ModelConfig) -> list[str]:
    """Of gated linear attention."""
    widths = {"model.gla.key_dim": config[GLAOptions].key_dim}
    return width_problems(config) + _uneven_heads(widths, config) + _one_way_problems(config)


def _uneven_heads(widths: Mapping[str, int], config: ModelConfig) -> list[str]:
    heads = config.num_heads
    return [
        f"{name}={width} must be a multiple of model.num_heads={heads}"
        for name, width in widths.items()
        if width % heads
    ]


def _one_way_problems(config: ModelConfig) -> list[str]:
    if config.num_heads % 2 == 0 or config.causal:
        return []
    return [
        f"model.num_heads={config.num_heads} must be even: in a bidirectional model every second head reads backward"
    ]


def ssd_problems(config: ModelConfig) -> list[str]:
    """Of the state-space unit."""
    width, head = config[SSDOptions].expanded_dim, config[SSDOptions].head_width
    return [f"model.ssd.expanded_dim={width} must be a multiple of model.ssd.head_width={head}"] if width % head else []


def width_problems(config: ModelConfig) -> list[str]:
    """Of heads that share the width."""
    dim, heads = config.model_dim, config.num_heads
    return [f"model.model_dim={dim} must be a multiple of model.num_heads={heads}"] if dim % heads else []


def segment_problems(config: ModelConfig) -> list[str]:
    """Of attention over segments."""
    found = width_problems(config)
    if config.model_dim % 2:
        found.append(f"sinusoids of distances need an even width: model.model_dim={config.model_dim} must be even")
    if config.short_convolution:
        found.append("model.family=transformer_xl has no short convolutions: set --config.model.short_convolution=0")
    return found


def head_problems(config: ModelConfig) -> list[str]:
    """Of heads that share the width, and may have rotary positions."""
    dim, heads = config.model_dim, config.num_heads
    if found := width_problems(config):
        return found
    if config.rotary and dim // heads % 2:
        return [f"model.rotary pairs dimensions: the head width {dim} / {heads} must be even"]
    return []


def softmax_problems(config: ModelConfig) -> list[str]:
    """Of softmax attention, whose queries may share keys."""
    found, heads, key_heads = head_problems(config), config.num_heads, config.num_kv_heads
    if heads % key_heads:
        found.append(f"model.num_heads={heads} must be a multiple of model.num_kv_heads={key_heads}")
    return found


def window_problems(config: ModelConfig) -> list[str]:
    """Of windows."""
    found, window = head_problems(config), config[WindowOptions]
    if len(window.dilations) > config.num_layers:
        found.append(
            f"model.window.dilations={window.dilations} must be at most model.num_layers={config.num_layers} numbers"
        )
    if window.dilated_heads > config.num_heads:
        found.append(
            f"model.window.dilated_heads={window.dilated_heads} must be at most model.num_heads={config.num_heads}"
        )
    return found


def span_problems(config: ModelConfig) -> list[str]:
    """Of learned spans."""
    found, span = head_problems(config), config[SpanOptions]
    if span.init > span.limit:
        found.append(f"model.span.init={span.init} must be at most model.span.limit={span.limit}")
    return found


def log_sparse_problems(config: ModelConfig) -> list[str]:
    """Of log-sparse attention."""
    found, own = head_problems(config), config[LogSparseOptions]
    if 0 < own.restart < own.local:
        found.append(f"model.log_sparse.restart={own.restart} must be 0 or at least model.log_sparse.local={own.local}")
    if own.convolution == "full" and not config.short_convolution:
        found.append("model.log_sparse.convolution=full needs model.short_convolution, its number of taps")
    return found


def gau_problems(config: ModelConfig) -> list[str]:
    """Of the gated attention unit."""
    found, gau = [], config[GAUOptions]
    if gau.expanded_dim % gau.heads:
        found.append(f"model.gau.expanded_dim={gau.expanded_dim} must be a multiple of model.gau.heads={gau.heads}")
    if (config.rotary or gau.relative_bias == "rope") and gau.shared_dim % 2:
        found.append(f"rotary positions pair dimensions: model.gau.shared_dim={gau.shared_dim} must be even")
    return found + _divisor_problems(config, gau.attention_function)


def _divisor_problems(config: ModelConfig, function: str) -> list[str]:
    """A count differs from query to query, and scores are divided by one number."""
    if function == "softmax" or (config.normalizer, config.divides) != ("count", "scores"):
        return []
    return ["model.normalizer=count cannot divide scores: set model.divides=weights, or give N as an integer"]


def mega_problems(config: ModelConfig) -> list[str]:
    """Of Mega's unit."""
    found, mega = [], config[MegaOptions]
    if (config.rotary or mega.relative_bias == "rope") and mega.shared_dim % 2:
        found.append(f"rotary positions pair dimensions: model.mega.shared_dim={mega.shared_dim} must be even")
    return found + _divisor_problems(config, mega.attention_function)


def filter_problems(config: ModelConfig) -> list[str]:
    """Of a filter of AFT-conv."""
    found = width_problems(config)
    if not config[AFTOptions].window:
        found.append("model.family=aft_conv needs a filter of one tap or more: raise --config.model.aft.window")
    return found
