"""Llama ("LLaMA", Touvron et al. 2023), as Hugging Face's `LlamaForCausalLM` reads it."""

from typing import Any

from flash_lm.config.model import ModelConfig
from flash_lm.models.formats.format import TRANSPOSED, Format, Setting, Settings, Tensor, of_type
from flash_lm.models.formats.settings import is_a

# Also those of its descendants: biases, and norms of queries and keys, are only in models that have them.
TENSORS = (
    Tensor("model.embed_tokens.weight", "embedding"),
    Tensor("model.layers.{i}.input_layernorm.weight", "layers.norm_sublayer_0.scale"),
    Tensor("model.layers.{i}.self_attn.q_proj.weight", "layers.sublayer_0.query.kernel", layout=TRANSPOSED),
    Tensor("model.layers.{i}.self_attn.k_proj.weight", "layers.sublayer_0.key.kernel", layout=TRANSPOSED),
    Tensor("model.layers.{i}.self_attn.v_proj.weight", "layers.sublayer_0.value.kernel", layout=TRANSPOSED),
    Tensor("model.layers.{i}.self_attn.o_proj.weight", "layers.sublayer_0.output.kernel", layout=TRANSPOSED),
    Tensor("model.layers.{i}.self_attn.q_proj.bias", "layers.sublayer_0.query.bias"),
    Tensor("model.layers.{i}.self_attn.k_proj.bias", "layers.sublayer_0.key.bias"),
    Tensor("model.layers.{i}.self_attn.v_proj.bias", "layers.sublayer_0.value.bias"),
    Tensor("model.layers.{i}.self_attn.o_proj.bias", "layers.sublayer_0.output.bias"),
    Tensor("model.layers.{i}.self_attn.q_norm.weight", "layers.sublayer_0.query_norm.scale"),
    Tensor("model.layers.{i}.self_attn.k_norm.weight", "layers.sublayer_0.key_norm.scale"),
    Tensor("model.layers.{i}.post_attention_layernorm.weight", "layers.norm_sublayer_1.scale"),
    Tensor("model.layers.{i}.mlp.gate_proj.weight", "layers.sublayer_1.gate.kernel", layout=TRANSPOSED),
    Tensor("model.layers.{i}.mlp.up_proj.weight", "layers.sublayer_1.up.kernel", layout=TRANSPOSED),
    Tensor("model.layers.{i}.mlp.down_proj.weight", "layers.sublayer_1.down.kernel", layout=TRANSPOSED),
    Tensor("model.layers.{i}.mlp.gate_proj.bias", "layers.sublayer_1.gate.bias"),
    Tensor("model.layers.{i}.mlp.up_proj.bias", "layers.sublayer_1.up.bias"),
    Tensor("model.layers.{i}.mlp.down_proj.bias", "layers.sublayer_1.down.bias"),
    Tensor("model.norm.weight", "norm.scale"),
    Tensor("lm_head.weight", "output_embedding"),
)
KEYS = {
    "vocab_size": Setting("vocab_size"),
    "model_dim": Setting("hidden_size"),
    "mlp_dim": Setting("intermediate_size"),
    "num_layers": Setting("num_hidden_layers"),
    "num_heads": Setting("num_attention_heads"),
    "max_length": Setting("max_position_embeddings"),
    "norm_epsilon": Setting("rms_norm_eps", float),
    "tie_embeddings": Setting("tie_word_embeddings", bool),
}
# The Transformer++ with RMS norms.
OURS = {
    "family": "transformer_plus_plus",
    "feed_forward": "glu",
    "norm": "rms",
    "absolute_positions": "none",
    "rotary": True,
    "short_convolution": 0,
}
THEIRS = {"hidden_act": "silu"}
INACTIVE = {
    "quantization_config": None,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
}
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048, "head_dim": None}


def read_heads(values: Settings) -> tuple[dict[str, Any], list[str]]:
    """Numbers and width of heads, and the base of the rotary angles; scaled angles are not supported."""
    heads = values["num_attention_heads"]
    shared = heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"]
    width = values["hidden_size"] // heads if values["head_dim"] is None else values["head_dim"]
    base, wrong = values.get("rope_theta"), []
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            wrong.append(f"{name}={rope}")
        else:
            base = rope.get("rope_theta", base)
    base = 10_000.0 if base is None else base
    found = {"num_key_value_heads": (shared, int), "head_dim": (width, int), "rope_theta": (base, float)}
    if wrong := wrong + [f"{name}={value}" for name, (value, kind) in found.items() if not is_a(kind, value)]:
        return {}, wrong
    return {"num_kv_heads": shared, "head_dim": width, "rotary_base": float(base)}, []


def write_heads(config: ModelConfig) -> dict[str, Any]:
    """The settings that `read_heads` reads, and the dtype."""
    return {
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "rope_theta": config.rotary_base,  # read by version 4 of transformers; the next by version 5
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "dtype": config.param_dtype,
    }


def _read(values: Settings) -> tuple[dict[str, Any], list[str]]:
    keys, wrong = read_heads(values)
    biases = values.get("attention_bias", False), values.get("mlp_bias", False)
    if biases not in ((False, False), (True, True)):
        wrong.append("attention_bias={}, mlp_bias={}".format(*biases))
    return keys | {"biases": "all" if all(biases) else "none"}, wrong


def _write(config: ModelConfig) -> dict[str, Any]:
    biased = config.biases == "all"
    return write_heads(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": biased,
        "mlp_bias": biased,
    }


def _problems(config: ModelConfig) -> list[str]:
    return [f"model.biases={config.biases}, not none or all"] if config.biases == "qkv" else []


LLAMA = Format(
    title="LlamaForCausalLM",
    recognises=of_type("llama"),
    tensors=TENSORS,
    keys=KEYS,
    ours=OURS | {"query_key_norm": False},
    theirs=THEIRS,
    inactive=INACTIVE | {"sliding_window": None},
    defaults=DEFAULTS,
    read=_read,
    write=_write,
    problems=_problems,
    ignored=("rotary_emb.inv_freq",),
)
ROWS = {"llama": LLAMA}
