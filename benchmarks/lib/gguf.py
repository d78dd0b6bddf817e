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


def write_gguf(folder: pathlib.Path, file: pathlib.Path, tokenizer: dict[str, Any] | None = None) -> pathlib.Path:
    """Writes a Llama, a Qwen2 or a Qwen3, and returns the file.

    Args:
        folder: with config.json and model.safetensors.
        file: the file to write.
        tokenizer: metadata tokenizer.ggml.…, by the last part of their names; None: one special token per id.
    """
    settings = json.loads((folder / "config.json").read_text())
    kind, heads, shared = (settings[x] for x in ("model_type", "num_attention_heads", "num_key_value_heads"))
    writer = GGUFWriter(file, kind)
    # The settings, and a tokenizer.
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_key_length(settings.get("head_dim") or settings["hidden_size"] // heads)
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_parameters"]["rope_theta"])
    words = [f"<{i}>" for i in range(settings["vocab_size"])]
    about = {"model": "gpt2", "pre": "gpt-2", "tokens": words, "token_type": [3] * len(words)}
    about |= {"bos_token_id": settings["bos_token_id"], "eos_token_id": settings["eos_token_id"]}
    for name, value in (tokenizer or about).items():
        add = writer.add_array if isinstance(value, list) else None
        if add is None:
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}", value)

    # The arrays. Rows i and i + K/2 of a head rotate together; in a Llama's file these are rows 2i and 2i + 1.
    for name, x in load_file(folder / "model.safetensors").items():
        count = {"q_proj": heads, "k_proj": shared}.get(name.split(".")[-2])
        if kind == "llama" and count:
            x = x.reshape(count, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(x))
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
