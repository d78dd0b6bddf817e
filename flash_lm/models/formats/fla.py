"""What the models of flash-linear-attention (fla) have in common: names, settings, and the width of the MLP."""

from typing import Any

from flash_lm.models.formats.format import TAPS, TRANSPOSED, Setting, Settings, Tensor
from flash_lm.models.formats.settings import is_a

ATTENTION, OURS = "model.layers.{i}.attn", "layers.sublayer_0"
EPSILON = 1e-6  # of all norms; ours of heads have it, too


def maps(**names: str) -> tuple[Tensor, ...]:
    """Linear maps of the attention: the name of theirs -> that of ours."""
    return tuple(
        Tensor(f"{ATTENTION}.{theirs}.weight", f"{OURS}.{ours}.kernel", layout=TRANSPOSED)
        for theirs, ours in names.items()
    )


TENSORS = (
    Tensor("model.embeddings.weight", "embedding"),
    Tensor("model.layers.{i}.attn_norm.weight", "layers.norm_sublayer_0.scale"),
    *maps(q_proj="query", k_proj="key", v_proj="value", g_proj="gate", o_proj="output"),
    *(
        Tensor(f"{ATTENTION}.{x[0]}_conv1d.weight", f"{OURS}.convolutions.{x}", layout=TAPS)
        for x in ("query", "key", "value")
    ),
    Tensor("model.layers.{i}.mlp_norm.weight", "layers.norm_sublayer_1.scale"),
    *(
        Tensor(f"model.layers.{{i}}.mlp.{x}_proj.weight", f"layers.sublayer_1.{x}.kernel", layout=TRANSPOSED)
        for x in ("gate", "up", "down")
    ),
    Tensor("model.norm.weight", "norm.scale"),
    Tensor("lm_head.weight", "output_embedding"),
)
KEYS = {
    "vocab_size": Setting("vocab_size"),
    "model_dim": Setting("hidden_size"),
    "num_layers": Setting("num_hidden_layers"),
    "num_heads": Setting("num_heads"),
    "max_length": Setting("max_position_embeddings"),
    "tie_embeddings": Setting("tie_word_embeddings", bool),
}
SHAPE = {
    "feed_forward": "glu",
    "biases": "none",
    "norm": "rms",
    "norm_epsilon": EPSILON,
    "absolute_positions": "none",
}
THEIRS = {"hidden_act": "swish", "norm_eps": EPSILON}
INACTIVE = {"attn": None, "attnres_block_size": None}
DEFAULTS = {"max_position_embeddings": 2048, "tie_word_embeddings": False, "conv_size": 4}


def read_mlp(values: Settings) -> tuple[dict[str, Any], list[str]]:
    """The MLP's width: two thirds of `hidden_ratio` D, rounded up to a multiple of 256, unless the file says it."""
    width, ratio = values.get("intermediate_size"), values.get("hidden_ratio")
    ratio = 4 if ratio is None else ratio
    if width is None and is_a(float, ratio):
        width = -(-int(values["hidden_size"] * ratio * 2 / 3) // 256) * 256
    if not is_a(int, width):
        return {}, [f"intermediate_size={width}, hidden_ratio={ratio}"]
    return {"mlp_dim": width}, []
