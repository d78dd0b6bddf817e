"""Mamba-2 (arXiv:2405.21060), as Hugging Face's `Mamba2ForCausalLM` reads it."""

import math
from typing import Any

from flash_lm.config.model import ModelConfig
from flash_lm.models.formats.format import TAPS, TRANSPOSED, Format, Setting, Settings, Tensor, of_type

_MIXER, _OURS = "backbone.layers.{i}.mixer", "layers.sublayer_{unit}"
# One of our layers is two of theirs.
_MAPS = ("gate.kernel", "value.kernel", "shared.kernel", "step_size.kernel")
LAYER = (
    Tensor("backbone.layers.{i}.norm.weight", "layers.norm_sublayer_{unit}.scale"),
    Tensor(f"{_MIXER}.in_proj.weight", *(f"{_OURS}.{name}" for name in _MAPS), layout=TRANSPOSED),
    Tensor(f"{_MIXER}.conv1d.weight", *(f"{_OURS}.convolutions.{x}" for x in ("value", "shared")), layout=TAPS),
    Tensor(f"{_MIXER}.conv1d.bias", f"{_OURS}.value_bias", f"{_OURS}.shared_bias"),
    Tensor(f"{_MIXER}.A_log", f"{_OURS}.log_rate"),
    Tensor(f"{_MIXER}.D", f"{_OURS}.skip"),
    Tensor(f"{_MIXER}.dt_bias", f"{_OURS}.step_bias"),
    Tensor(f"{_MIXER}.norm.weight", f"{_OURS}.norm.scale"),
    Tensor(f"{_MIXER}.out_proj.weight", f"{_OURS}.output.kernel", layout=TRANSPOSED),
    Tensor("backbone.norm_f.weight", "norm.scale"),
    Tensor("lm_head.weight", "output_embedding"),
)
_KEYS = {
    "ssd.head_width": "head_dim",
    "ssd.state_dim": "state_size",
    "short_convolution": "conv_kernel",
}
_LONGEST = 2048  # tokens of a row in the authors' training; the files do not say, and the state has no limit


def read_sizes(values: Settings) -> tuple[dict[str, Any], list[str]]:
    """Layers, heads and the width of the values."""
    layers, heads, width = (values[name] for name in ("num_hidden_layers", "num_heads", "head_dim"))
    wrong = [f"num_hidden_layers={layers} (it must be even)"] if layers % 2 else []
    if heads * width != values["expand"] * values["hidden_size"]:
        wrong.append(f"num_heads={heads} of head_dim={width} for expand={values['expand']}")
    # No clamp of the step. JSON has no infinity, and transformers writes it in several ways.
    if values["time_step_limit"] not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.0, None]):
        wrong.append(f"time_step_limit={values['time_step_limit']}")
    if wrong:
        return {}, wrong
    return {"num_layers": layers // 2, "ssd.expanded_dim": heads * width, "max_length": _LONGEST}, []


def _write(config: ModelConfig) -> dict[str, Any]:
    width = config.get("ssd.expanded_dim")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_hidden_layers": 2 * config.num_layers,
        "num_heads": width // config.get("ssd.head_width"),
        "expand": width // config.model_dim,
        "dtype": config.param_dtype,
    }


def _problems(config: ModelConfig) -> list[str]:
    width, taps = config.get("ssd.expanded_dim"), config.short_convolution
    wrong = ["model.short_convolution=0, not some taps"] if not taps else []
    if width % config.model_dim:
        wrong.append(f"model.ssd.expanded_dim={width}, not a multiple of model.model_dim={config.model_dim}")
    return wrong


MAMBA2 = Format(
    title="Mamba2ForCausalLM",
    recognises=of_type("mamba2"),
    tensors=(Tensor("backbone.embeddings.weight", "embedding"), *LAYER),
    keys={
        "vocab_size": Setting("vocab_size"),
        "model_dim": Setting("hidden_size"),
        "norm_epsilon": Setting("layer_norm_epsilon", float),
        "tie_embeddings": Setting("tie_word_embeddings", bool),
        **{key: Setting(name) for key, name in _KEYS.items()},
    },
    ours={
        "family": "mamba2",
        "biases": "none",
        "norm": "rms",
        "absolute_positions": "none",
    },
    needs={"num_hidden_layers": int, "num_heads": int, "expand": float},
    theirs={"n_groups": 1, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu"},
    inactive={"rms_norm": True, "norm_before_gate": False},
    defaults={
        "n_groups": 8,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, math.inf],
        "tie_word_embeddings": False,
    },
    read=read_sizes,
    write=_write,
    problems=_problems,
    units=2,
    float32=True,  # as its authors' residual stream
)


ROWS = {"mamba2": MAMBA2}
