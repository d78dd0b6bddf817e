"""RWKV-4 (arXiv:2305.13048), as Hugging Face's `RwkvForCausalLM` reads it."""

from typing import Any

import numpy as np

from flash_lm.errors import InputError
from flash_lm.models.formats.format import CHANNELS, TRANSPOSED, Arrays, Format, Setting, Settings, Tensor, of_type
from flash_lm.models.formats.settings import is_a

_BLOCK = "rwkv.blocks.{i}"
_TIME, _CHANNEL = f"{_BLOCK}.attention", f"{_BLOCK}.feed_forward"
_OURS_TIME, _OURS_CHANNEL = "layers.sublayer_0", "layers.sublayer_1"
_TABLE, _FIRST_NORM = "rwkv.embeddings.weight", "rwkv.blocks.0.pre_ln"
_EPSILON = 1e-5  # of all norms in their code; the setting has the same default
_TENSORS = (
    Tensor(_TABLE, "embedding"),
    Tensor(f"{_BLOCK}.ln1.weight", "layers.norm_sublayer_0.scale"),
    Tensor(f"{_BLOCK}.ln1.bias", "layers.norm_sublayer_0.bias"),
    Tensor(f"{_BLOCK}.ln2.weight", "layers.norm_sublayer_1.scale"),
    Tensor(f"{_BLOCK}.ln2.bias", "layers.norm_sublayer_1.bias"),
    Tensor(f"{_TIME}.time_decay", f"{_OURS_TIME}.core.log_rate"),
    Tensor(f"{_TIME}.time_first", f"{_OURS_TIME}.core.bonus"),
    *(
        Tensor(f"{_TIME}.time_mix_{x}", f"{_OURS_TIME}.convolutions.{x}", layout=CHANNELS)
        for x in ("key", "value", "receptance")
    ),
    *(
        Tensor(f"{_TIME}.{x}.weight", f"{_OURS_TIME}.{x}.kernel", layout=TRANSPOSED)
        for x in ("key", "value", "receptance", "output")
    ),
    *(Tensor(f"{_CHANNEL}.time_mix_{x}", f"{_OURS_CHANNEL}.shift.{x}", layout=CHANNELS) for x in ("key", "receptance")),
    *(
        Tensor(f"{_CHANNEL}.{theirs}.weight", f"{_OURS_CHANNEL}.{ours}.kernel", layout=TRANSPOSED)
        for theirs, ours in (("key", "up"), ("receptance", "receptance"), ("value", "down"))
    ),
    Tensor("rwkv.ln_out.weight", "norm.scale"),
    Tensor("rwkv.ln_out.bias", "norm.bias"),
    Tensor("head.weight", "output_embedding"),
)


def _read(values: Settings) -> tuple[dict[str, Any], list[str]]:
    dim, width = values["hidden_size"], values.get("intermediate_size")
    width, inner = 4 * dim if width is None else width, values.get("attention_hidden_size")
    wrong = [f"intermediate_size={width}"] if not is_a(int, width) else []
    wrong += [f"attention_hidden_size={inner}"] if inner not in (None, dim) else []
    return {"mlp_dim": width}, wrong


def _fold_first_norm(arrays: Arrays) -> Arrays:
    """Normalises the embedding: the norm reads nothing else, so both together are a table, too."""
    arrays, norm = dict(arrays), [f"{_FIRST_NORM}.{name}" for name in ("weight", "bias")]
    if missing := [name for name in (*norm, _TABLE) if name not in arrays]:
        raise InputError(f"the weights are not those of RwkvForCausalLM: no {', '.join(missing)}")
    read, scale, bias = arrays[_TABLE], *(arrays.pop(name) for name in norm)

    def fold() -> np.ndarray:
        table, (gain_D, bias_D) = read(), (x().astype(np.float64) for x in (scale, bias))
        x_VxD = table.astype(np.float64)
        centred = x_VxD - x_VxD.mean(axis=1, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + _EPSILON)
        return (normal * gain_D + bias_D).astype(table.dtype)

    return {**arrays, _TABLE: fold}


ROWS = {
    "rwkv4": Format(
        title="RwkvForCausalLM",
        recognises=of_type("rwkv"),
        tensors=_TENSORS,
        keys={
            "vocab_size": Setting("vocab_size"),
            "model_dim": Setting("hidden_size"),
            "num_layers": Setting("num_hidden_layers"),
            "max_length": Setting("context_length"),
        },
        ours={
            "family": "rwkv4",
            "biases": "none",
            "norm": "layer",
            "norm_epsilon": _EPSILON,
            "absolute_positions": "none",
            "tie_embeddings": False,
        },
        theirs={"tie_word_embeddings": False, "layer_norm_epsilon": _EPSILON},
        defaults={"context_length": 1024},
        read=_read,
        prepare=_fold_first_norm,
        float32=True,  # the folded table would be rounded
        one_way="an import folds the first norm into the embedding, and that cannot be undone",
    )
}
