"""A GGUF file, the format of llama.cpp: settings and names as in Hugging Face's format, arrays without quantisation.

Source: the GGUF specification (ggml, docs/gguf.md), and the package `gguf`, which reads all of its types.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flash_lm.data.gguf_tokenizer import gguf_tokenizer
from flash_lm.errors import InputError, first_line, missing_package
from flash_lm.inference.sources.source import Source

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
        InputError: it is damaged, of another architecture, or has scaled rotary angles; or `gguf` is not installed.
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

    # Settings, and the width of a head from its old key or the new one.
    kind = about.get("general.architecture")
    if kind not in _PERMUTED:
        raise InputError(f"{path} has architecture {kind}: only {', '.join(_PERMUTED)} can be read from GGUF")
    names = {tensor.name for tensor in reader.tensors}
    settings = _settings(kind, about, tied="output.weight" not in names)
    wrong = [name for name in sorted(names) if name.startswith("rope_freqs")]
    scaling = about.get(f"{kind}.rope.scaling.type", "none")
    wrong += [f"rope.scaling.type={scaling}"] if scaling != "none" else []
    rotated = about.get(f"{kind}.rope.dimension_count", settings["head_dim"])
    wrong += [f"rope.dimension_count={rotated}"] if rotated != settings["head_dim"] else []
    if wrong:
        raise InputError(f"{path} has {', '.join(wrong)}, which flash_lm does not support")

    # Arrays by their names in a folder.
    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}

    def reads(tensor: Any, heads: int | None) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            x = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
            return x.reshape(tensor.shape[::-1]) if heads is None else unpermute(x.reshape(tensor.shape[::-1]), heads)

        return read

    arrays = {}
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2] if tensor.name.count(".") > 1 else ""
        arrays[_their_name(tensor.name)] = reads(tensor, heads.get(part) if _PERMUTED[kind] else None)
    types = ", ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
    yield Source(f"GGUF ({types})", settings, arrays, "float32", lambda rows: gguf_tokenizer(about, path, rows))


def _settings(kind: str, about: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The config.json of the same model."""
    settings = {name: about.get(f"{kind}.{key}") for name, key in _SETTINGS.items()}
    settings |= {"model_type": kind, "tie_word_embeddings": tied}
    settings["vocab_size"] = len(about.get("tokenizer.ggml.tokens") or ())
    # Epsilon is a float32: the decimal number that rounds to it is meant.
    if isinstance(epsilon := settings["rms_norm_eps"], float):
        settings["rms_norm_eps"] = float(np.format_float_scientific(np.float32(epsilon), unique=True))
    dim, heads = settings["hidden_size"], settings["num_attention_heads"]
    if settings["num_key_value_heads"] is None:
        settings["num_key_value_heads"] = heads
    if settings["head_dim"] is None and isinstance(dim, int) and isinstance(heads, int) and heads > 0:
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
