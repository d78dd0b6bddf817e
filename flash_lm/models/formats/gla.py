"""Gated linear attention (arXiv:2312.06635), as `GLAForCausalLM` of flash-linear-attention (fla) reads it."""

from typing import Any

from flash_lm.config.model import ModelConfig
from flash_lm.models.formats import fla
from flash_lm.models.formats.format import Arrays, Format, Settings, Tensor, of_type

_TENSORS = (
    *fla.TENSORS,
    *fla.maps(**{"gk_proj.0": "decay_down", "gk_proj.1": "decay_up"}),
    Tensor(f"{fla.ATTENTION}.gk_proj.1.bias", f"{fla.OURS}.decay_bias"),
    Tensor(f"{fla.ATTENTION}.g_norm_swish_gate.weight", f"{fla.OURS}.gain"),
)


def _read(values: Settings) -> tuple[dict[str, Any], list[str]]:
    (mlp, wrong), heads = fla.read_mlp(values), values["num_heads"]
    keys = values["hidden_size"] * values["expand_k"]
    wrong += [f"expand_k={values['expand_k']}"] if keys != int(keys) or keys % heads else []
    wrong += [f"num_kv_heads={shared}"] if (shared := values.get("num_kv_heads")) not in (None, heads) else []
    taps = values["conv_size"] if values["use_short_conv"] else 0
    more = {"convolution.activation": "silu"} if taps else {}
    return {**mlp, "gla.key_dim": int(keys), "short_convolution": taps, **more}, wrong


def _write(config: ModelConfig) -> dict[str, Any]:
    taps = config.short_convolution
    about = {"architectures": ["GLAForCausalLM"], "model_type": "gla", "intermediate_size": config.mlp_dim}
    sizes = {"expand_k": config.get("gla.key_dim") / config.model_dim, "expand_v": 1.0, "num_kv_heads": None}
    return about | sizes | {"use_short_conv": bool(taps), "conv_size": taps or 4, "dtype": config.param_dtype}


def _problems(config: ModelConfig) -> list[str]:
    silu = config.get("convolution.activation") == "silu"
    return [] if silu or not config.short_convolution else ["model.convolution.activation=none, not silu"]


def _one_name(arrays: Arrays) -> Arrays:
    """The norm of heads by one name: where it is not fused with the gate, it has another."""
    return {name.replace(".g_norm.", ".g_norm_swish_gate."): read for name, read in arrays.items()}


ROWS = {
    "gla": Format(
        title="GLAForCausalLM of fla",
        recognises=of_type("gla"),
        tensors=_TENSORS,
        keys=fla.KEYS,
        ours={
            "family": "gla",
            "gla.gate_rank": 16,
            "gla.gate_normalizer": 16.0,
            "gla.gate_floor": -5.0,
            "output_gate": "silu",
            "head_norm": True,
            **fla.SHAPE,
        },
        needs={"expand_k": float, "conv_size": int, "use_short_conv": bool},
        theirs={**fla.THEIRS, "expand_v": 1.0, "use_output_gate": True, "elementwise_affine": True},
        inactive={
            **fla.INACTIVE,
            "feature_map": None,
            "clamp_min": None,
            "use_gk": True,
            "use_gv": False,
            "gate_logit_normalizer": 16,
            "gate_low_rank_dim": 16,
        },
        defaults={**fla.DEFAULTS, "expand_k": 0.5, "use_short_conv": False},
        read=_read,
        write=_write,
        problems=_problems,
        prepare=_one_name,
        library="fla",
    ),
}
