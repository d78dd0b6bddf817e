"""Conversion between the Transformer++ with RMS norm and Hugging Face's `LlamaForCausalLM`: names, layouts, settings.

Our kernels, (inputs, outputs), are transposed in PyTorch; our layers are stacked, and a Llama's have a name each.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError

_MODEL_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output_embedding": "lm_head.weight",
}
_LAYER_NAMES = {
    "norm_sublayer_0.scale": "input_layernorm.weight",
    "sublayer_0.query.kernel": "self_attn.q_proj.weight",
    "sublayer_0.key.kernel": "self_attn.k_proj.weight",
    "sublayer_0.value.kernel": "self_attn.v_proj.weight",
    "sublayer_0.output.kernel": "self_attn.o_proj.weight",
    "norm_sublayer_1.scale": "post_attention_layernorm.weight",
    "sublayer_1.gate.kernel": "mlp.gate_proj.weight",
    "sublayer_1.up.kernel": "mlp.up_proj.weight",
    "sublayer_1.down.kernel": "mlp.down_proj.weight",
}
# Keys of `config.model` and of their config.json with the same number.
_SETTINGS = {
    "vocab_size": "vocab_size",
    "model_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_KINDS = {"norm_epsilon": float, "tie_embeddings": bool}  # all others are integers
# Our settings for their model.
_SHAPE = {
    "family": "transformer_plus_plus",
    "pattern": (),
    "causal": True,
    "head": "softmax",
    "norm": "rms",
    "absolute_positions": "none",
    "rotary": True,
    "short_convolution": 0,
    "query_key_norm": False,
    "softmax.cap": 0.0,
}
# Their settings for our model, if config.json has them.
_THEIR_SHAPE = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "pretraining_tp": 1,
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}
_IGNORED = "rotary_emb.inv_freq"  # in old checkpoints; it follows from the settings


def unsupported_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of a complete `config.model` that differ from a Llama's, with the required values."""
    return {key: value for key, value in _SHAPE.items() if config.get(key) != value}


def llama_settings(config: ModelConfig) -> dict[str, Any]:
    """The model settings of a Llama's config.json.

    Args:
        config: a complete config for which `unsupported_keys` is empty.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: config.get(ours) for ours, theirs in _SETTINGS.items()},
        **{key: value for key, value in _THEIR_SHAPE.items() if value is not None},
        "head_dim": config.model_dim // config.num_heads,
        "rope_theta": config.rotary_base,  # read by version 4; the next by version 5
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "dtype": config.param_dtype,
    }


def model_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `config.model` from a Llama's config.json.

    Raises:
        InputError: it is not a Llama, or one that flash_lm does not support; lists every reason.
    """
    # Sizes and switches by name, with the defaults of transformers.
    if settings.get("model_type") != "llama":
        raise InputError(f"config.json has model_type={settings.get('model_type')}: only llama is supported")
    values = {**_DEFAULTS, "num_key_value_heads": settings.get("num_attention_heads"), **settings}
    keys: dict[str, Any] = {ours: values.get(theirs) for ours, theirs in _SETTINGS.items()}
    wrong = [f"{_SETTINGS[key]}={value}" for key, value in keys.items() if not _has_type(_KINDS.get(key, int), value)]
    if wrong:
        raise InputError(f"config.json has {', '.join(wrong)}: it is damaged, or the model is not a Llama")

    # Everything else must be as in our Transformer++: activation, biases, head width, rotary base without scaling.
    wrong = [f"{key}={values[key]}" for key, good in _THEIR_SHAPE.items() if values.get(key, good) != good]
    width = keys["model_dim"] // keys["num_heads"]
    if values.get("head_dim") not in (None, width):
        wrong.append(f"head_dim={values['head_dim']}")
    base = values.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) != "default":
            wrong.append(f"{key}={rope}")
        else:
            base = rope.get("rope_theta", base)
    base = 10_000.0 if base is None else base
    if not _has_type(float, base):
        wrong.append(f"rope_theta={base}")
    if wrong:
        raise InputError(f"config.json has {', '.join(wrong)}, which flash_lm does not support")
    return _SHAPE | keys | {"norm_epsilon": float(keys["norm_epsilon"]), "rotary_base": float(base)}


def _has_type(kind: type, value: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    good = (int, float) if kind is float else int
    return isinstance(value, good) and not isinstance(value, bool) and value > 0


def to_llama(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts our parameters on the host to a Llama's arrays by name."""
    arrays, ours = {}, cast(dict[str, np.ndarray], flatten_dict(dict(params), sep="."))
    for name, x in ours.items():
        if name in _MODEL_NAMES:
            arrays[_MODEL_NAMES[name]] = x
            continue
        layer_name = name.removeprefix("layers.")
        for i, layer in enumerate(x):
            arrays[_llama_name(i, layer_name)] = layer.T if layer_name.endswith("kernel") else layer
    return arrays


def from_llama(names: Iterable[str], read: Callable[[str], np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """Converts a Llama's arrays to our nested parameters.

    Args:
        names: names of all its arrays.
        read: returns the array of a name.
        config: a complete config from `model_keys`.

    Raises:
        InputError: arrays are missing, unknown (such as biases), or of another shape.
    """
    # The names must be exactly those of the config's layers.
    model_names = [key for key in _MODEL_NAMES if key != "output_embedding" or not config.tie_embeddings]
    names = list(names)
    if config.num_layers > len(names):
        raise InputError(
            f"config.json has num_hidden_layers={config.num_layers}, and the weights have {len(names)} arrays: it is "
            "damaged, or files are missing"
        )
    expected = {_MODEL_NAMES[key] for key in model_names}
    expected |= {_llama_name(i, layer_name) for i in range(config.num_layers) for layer_name in _LAYER_NAMES}
    present = {name for name in names if not name.endswith(_IGNORED)}
    if config.tie_embeddings:
        present -= {_MODEL_NAMES["output_embedding"]}  # in some files, a copy of the embedding
    if wrong := [*(f"no {x}" for x in sorted(expected - present)), *(f"also {x}" for x in sorted(present - expected))]:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InputError(f"the weights are not those of a Llama without biases: {', '.join(wrong[:5])}{more}")

    # Read layer by layer, transpose kernels, and stack.
    flat = {key: read(_MODEL_NAMES[key]) for key in model_names}
    for layer_name in _LAYER_NAMES:
        layers = [read(_llama_name(i, layer_name)) for i in range(config.num_layers)]
        if len(shapes := {x.shape for x in layers}) > 1:
            raise InputError(f"{_LAYER_NAMES[layer_name]} has different shapes in different layers: {sorted(shapes)}")
        flat[f"layers.{layer_name}"] = np.stack([x.T if layer_name.endswith("kernel") else x for x in layers])
    return unflatten_dict(flat, sep=".")


def _llama_name(i: int, layer_name: str) -> str:
    return f"model.layers.{i}.{_LAYER_NAMES[layer_name]}"
