"""Gated DeltaNet (arXiv:2412.06464), as `GatedDeltaNetForCausalLM` of flash-linear-attention (fla) reads it."""

from typing import Any

from flash_lm.config.model import ModelConfig
from flash_lm.models.formats import fla
from flash_lm.models.formats.format import Format, Setting, Settings, Tensor, of_type

_TENSORS = (
    *fla.TENSORS,
    *fla.maps(a_proj="step_size", b_proj="beta"),
    Tensor(f"{fla.ATTENTION}.A_log", f"{fla.OURS}.log_rate"),
    Tensor(f"{fla.ATTENTION}.dt_bias", f"{fla.OURS}.step_bias"),
    Tensor(f"{fla.ATTENTION}.o_norm.weight", f"{fla.OURS}.gain"),
)


def _read(values: Settings) -> tuple[dict[str, Any], list[str]]:
    (mlp, wrong), heads = fla.read_mlp(values), values["num_heads"]
    keys = heads * values["head_dim"]
    wrong += [f"num_v_heads={other}"] if (other := values.get("num_v_heads")) not in (None, heads) else []
    sizes = {"delta.key_dim": keys, "delta.value_dim": round(keys * values["expand_v"])}
    gate = "silu" if values["use_gate"] else "none"
    return {**mlp, "short_convolution": values["conv_size"], "output_gate": gate, **sizes}, wrong


def _write(config: ModelConfig) -> dict[str, Any]:
    keys, values = config.get("delta.key_dim"), config.get("delta.value_dim")
    about = {"architectures": ["GatedDeltaNetForCausalLM"], "model_type": "gated_deltanet"}
    sizes = {"head_dim": keys // config.num_heads, "expand_v": values / keys, "conv_size": config.short_convolution}
    more = {"use_gate": config.output_gate == "silu", "dtype": config.param_dtype}
    return about | sizes | more | {"intermediate_size": config.mlp_dim}


def _problems(config: ModelConfig) -> list[str]:
    return [] if config.short_convolution else ["model.short_convolution=0, not some taps"]


ROWS = {
    "gated_deltanet": Format(
        title="GatedDeltaNetForCausalLM of fla",
        recognises=of_type("gated_deltanet"),
        tensors=_TENSORS,
        keys=fla.KEYS | {"delta.negative_eigenvalues": Setting("allow_neg_eigval", bool)},
        ours={"family": "gated_deltanet", "delta.decay": True, "head_norm": True, **fla.SHAPE},
        needs={"head_dim": int, "expand_v": float, "conv_size": int, "use_gate": bool},
        theirs={**fla.THEIRS, "use_short_conv": True, "output_gate_activation": "swish"},
        inactive=fla.INACTIVE,
        defaults={**fla.DEFAULTS, "expand_v": 2.0, "head_dim": 256, "use_gate": True, "allow_neg_eigval": False},
        read=_read,
        write=_write,
        problems=_problems,
        library="fla",
    ),
}
