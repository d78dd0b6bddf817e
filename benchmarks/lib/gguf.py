"""Writes a model in Hugging Face's format as GGUF, as llama.cpp's converter does; for checks of what reads it."""

import json
import pathlib
from typing import Any

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import load_file

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    folder: pathlib.Path, file: pathlib.Path, settings: dict[str, Any] | None = None, dtype: str = "float32"
) -> pathlib.Path:
    """Writes a Llama, a Qwen2 or a Qwen3, and returns the file.

    Args:
        folder: with config.json and model.safetensors.
        file: the file to write.
        settings: further metadata of the architecture, by name; None leaves one out.
        dtype: of the matrices.
    """
    theirs = json.loads((folder / "config.json").read_text())
    kind, heads, shared = (theirs[x] for x in ("model_type", "num_attention_heads", "num_key_value_heads"))
    architecture: dict[str, Any] = {
        "embedding_length": theirs["hidden_size"],
        "block_count": theirs["num_hidden_layers"],
        "feed_forward_length": theirs["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": shared,
        "attention.key_length": theirs.get("head_dim") or theirs["hidden_size"] // heads,
        "attention.layer_norm_rms_epsilon": float(theirs["rms_norm_eps"]),
        "context_length": theirs["max_position_embeddings"],
        "rope.freq_base": float(theirs["rope_parameters"]["rope_theta"]),
    }
    words = [f"<{i}>" for i in range(theirs["vocab_size"])]
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": words, "token_type": [3] * len(words)}
    tokenizer |= {"bos_token_id": theirs["bos_token_id"], "eos_token_id": theirs["eos_token_id"]}
    metadata = {f"{kind}.{name}": value for name, value in (architecture | (settings or {})).items()}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}

    # Metadata, each with the type that it has in such files.
    writer = GGUFWriter(file, kind)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adds |= {str: writer.add_string, list: writer.add_array}
    for name, value in metadata.items():
        if value is not None:
            adds[type(value)](name, value)

    # The arrays. Rows i and i + K/2 of a head rotate together; in a Llama's file these are rows 2i and 2i + 1.
    for name, x in load_file(folder / "model.safetensors").items():
        count = {"q_proj": heads, "k_proj": shared}.get(name.split(".")[-2])
        if kind == "llama" and count:
            x = x.reshape(count, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(x.astype(dtype if x.ndim > 1 else np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    stem, end = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_MODEL[stem]}.{end}"
    _, _, i, part = stem.split(".", 3)
    return f"blk.{i}.{_LAYER[part]}.{end}"
