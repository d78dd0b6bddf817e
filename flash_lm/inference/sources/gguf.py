"""A GGUF file, the format of llama.cpp: settings and names as in Hugging Face's format, arrays without quantisation.

Source: the GGUF specification (ggml, docs/gguf.md), and the package `gguf`, which dequantises.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_lm.data.gguf_tokenizer import gguf_tokenizer
from flash_lm.errors import InputError, first_line, missing_package
from flash_lm.inference.sources.source import Source
from flash_lm.models.formats.settings import is_a

# Names of a layer's arrays, both with .weight or .bias.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Settings of a config.json -> the key of an architecture.
_SETTINGS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
# Architectures whose names are those above -> whether the rows of queries and keys are permuted.
_PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}


@contextlib.contextmanager
def open_gguf(path: pathlib.Path) -> Iterator[Source]:
    """Opens a GGUF file; an array is dequantised to float32 when it is read.

    Raises:
        InputError: it is damaged, a part of a model, of another architecture, or has settings that flash_lm does not
            support, such as scaled rotary angles; or `gguf` is not installed.
    """
    try:
        import gguf  # noqa: PLC0415 (an extra)
    except ImportError:
        raise missing_package("gguf", "gguf") from None
    try:
        reader = gguf.GGUFReader(path)
        about = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library raises what it meets
        raise InputError(f"{path} cannot be read as GGUF ({first_line(error)}): download it again") from None

    # Settings. Others than these may change the model.
    kind = about.get("general.architecture")
    if not isinstance(kind, str) or kind not in _PERMUTED:
        raise InputError(f"{path} has architecture {kind!r:.80}: only {', '.join(_PERMUTED)} can be read from GGUF")
    names = {tensor.name for tensor in reader.tensors}
    settings = _settings(kind, about, tied="output.weight" not in names)
    if wrong := _unread(kind, about, settings["head_dim"]) + [name for name in names if name.startswith("rope_freqs")]:
        raise InputError(f"{path} has {', '.join(sorted(wrong))}, which flash_lm does not support")

    # Arrays by their names in a folder; queries and keys with their own numbers of heads.
    counts = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    heads: dict[str, Any] = counts if _PERMUTED[kind] else {}

    def read(tensor: Any) -> np.ndarray:
        try:
            x = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(tensor.shape[::-1])
        except (NotImplementedError, ValueError) as error:
            problem = f"{tensor.name} of type {tensor.tensor_type.name} ({first_line(error)})"
            raise InputError(f"{path} has {problem}, which cannot be read: give another file of the model") from None
        # Rows that do not divide are of another shape than the settings say, which is reported for all arrays.
        count = heads.get(tensor.name.split(".")[-2], 0)
        return unpermute(x, count) if is_a(int, count) and len(x) % (2 * count) == 0 else x

    arrays = {_their_name(tensor.name): lambda tensor=tensor: read(tensor) for tensor in reader.tensors}
    types = ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
    yield Source(f"GGUF ({types})", settings, arrays, "float32", lambda rows: gguf_tokenizer(about, path, rows))


def _unread(kind: str, about: dict[str, Any], width: Any) -> list[str]:
    """Metadata that change the model in a way that is not read."""
    known = {*_SETTINGS.values(), "vocab_size"}
    # Values of further keys that change nothing; a list: one of several.
    fine = {"rope.dimension_count": [width], "attention.value_length": [width], "rope.scaling.type": ["none"]}
    fine |= {
        "attention.causal": [True],
        "expert_count": [0],
        "expert_used_count": [0],
        "rope.scaling.finetuned": [False],
    }
    wrong = [] if about.get("split.count", 1) in (0, 1) else [f"split.count={about['split.count']}"]
    for name, value in about.items():
        key = name.removeprefix(f"{kind}.")
        if key != name and key not in known and value not in fine.get(key, []):
            wrong.append(f"{name}={value!r:.80}")
    return wrong


def _settings(kind: str, about: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The config.json of the same model."""
    settings = {name: about.get(f"{kind}.{key}") for name, key in _SETTINGS.items()}
    settings |= {"model_type": kind, "tie_word_embeddings": tied}
    settings["vocab_size"] = len(about.get("tokenizer.ggml.tokens") or ())
    # Epsilon is a float32: the decimal number that rounds to it is meant.
    if isinstance(epsilon := settings["rms_norm_eps"], float):
        settings["rms_norm_eps"] = float(np.format_float_scientific(np.float32(epsilon), unique=True))
    dim: Any = settings["hidden_size"]
    heads: Any = settings["num_attention_heads"]
    if settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = heads
    if settings["head_dim"] is None and is_a(int, dim) and is_a(int, heads):
        settings["head_dim"] = dim // heads
    return settings


def _their_name(name: str) -> str:
    """A tensor's name in a folder of Hugging Face's format; an unknown one stays."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _MODEL:
        return f"{_MODEL[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


def unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys, from pairs of adjacent ones that rotate together to pairs half a head apart.

    llama.cpp rotates rows 2i and 2i + 1 of a head, Hugging Face's classes and ours rows i and i + K/2.
    """
    by_head = x.reshape(heads, -1, 2, *x.shape[1:])
    return by_head.swapaxes(1, 2).reshape(x.shape)
