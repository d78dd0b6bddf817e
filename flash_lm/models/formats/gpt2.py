"""GPT-2 (Radford et al. 2019), as Hugging Face's `GPT2LMHeadModel` reads it: a Transformer with biases in all maps."""

from typing import Any

from flash_lm.config.model import ModelConfig
from flash_lm.models.formats.format import Arrays, Format, Setting, Settings, Tensor, of_type
from flash_lm.models.formats.settings import is_a

_QUERIES_KEYS_VALUES = ("query", "key", "value")
# Their maps are (inputs, outputs), as ours.
_TENSORS = (
    Tensor("transformer.wte.weight", "embedding"),
    Tensor("transformer.wpe.weight", "positions.table"),
    Tensor("transformer.h.{i}.ln_1.weight", "layers.norm_sublayer_0.scale"),
    Tensor("transformer.h.{i}.ln_1.bias", "layers.norm_sublayer_0.bias"),
    Tensor("transformer.h.{i}.attn.c_attn.weight", *(f"layers.sublayer_0.{x}.kernel" for x in _QUERIES_KEYS_VALUES)),
    Tensor("transformer.h.{i}.attn.c_attn.bias", *(f"layers.sublayer_0.{x}.bias" for x in _QUERIES_KEYS_VALUES)),
    Tensor("transformer.h.{i}.attn.c_proj.weight", "layers.sublayer_0.output.kernel"),
    Tensor("transformer.h.{i}.attn.c_proj.bias", "layers.sublayer_0.output.bias"),
    Tensor("transformer.h.{i}.ln_2.weight", "layers.norm_sublayer_1.scale"),
    Tensor("transformer.h.{i}.ln_2.bias", "layers.norm_sublayer_1.bias"),
    Tensor("transformer.h.{i}.mlp.c_fc.weight", "layers.sublayer_1.up.kernel"),
    Tensor("transformer.h.{i}.mlp.c_fc.bias", "layers.sublayer_1.up.bias"),
    Tensor("transformer.h.{i}.mlp.c_proj.weight", "layers.sublayer_1.down.kernel"),
    Tensor("transformer.h.{i}.mlp.c_proj.bias", "layers.sublayer_1.down.bias"),
    Tensor("transformer.ln_f.weight", "norm.scale"),
    Tensor("transformer.ln_f.bias", "norm.bias"),
    Tensor("lm_head.weight", "output_embedding"),
)


def _read(values: Settings) -> tuple[dict[str, Any], list[str]]:
    dim, heads, width = values["n_embd"], values["n_head"], values.get("n_inner")
    width = 4 * dim if width is None else width
    if not is_a(int, width):
        return {}, [f"n_inner={width}"]
    return {"mlp_dim": width, "num_kv_heads": heads}, []


def _write(config: ModelConfig) -> dict[str, Any]:
    about = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return about | {"n_inner": config.mlp_dim, "dtype": config.param_dtype}


def _problems(config: ModelConfig) -> list[str]:
    wrong = {
        "num_kv_heads": (config.num_kv_heads, config.num_heads),
        "head_dim": (config.head_width, config.model_dim // config.num_heads),
    }
    return [f"model.{key}={value}, not {good}" for key, (value, good) in wrong.items() if value != good]


def _with_prefix(arrays: Arrays) -> Arrays:
    """The names of the model with a head: the first files have those of the model without."""
    named = lambda name: name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
    return {named(name): read for name, read in arrays.items()}


ROWS = {
    "gpt2": Format(
        title="GPT2LMHeadModel",
        recognises=of_type("gpt2"),
        tensors=_TENSORS,
        keys={
            "vocab_size": Setting("vocab_size"),
            "model_dim": Setting("n_embd"),
            "num_layers": Setting("n_layer"),
            "num_heads": Setting("n_head"),
            "max_length": Setting("n_positions"),
            "norm_epsilon": Setting("layer_norm_epsilon", float),
            "tie_embeddings": Setting("tie_word_embeddings", bool),
        },
        ours={
            "family": "transformer",
            "feed_forward": "mlp",
            "biases": "all",
            "norm": "layer",
            "absolute_positions": "learned",
            "rotary": False,
            "query_key_norm": False,
            "short_convolution": 0,
        },
        theirs={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_positions": 1024},
        read=_read,
        write=_write,
        problems=_problems,
        ignored=(".attn.bias", ".attn.masked_bias"),  # masks of old files
        prepare=_with_prefix,
    )
}
