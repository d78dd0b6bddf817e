"""Llama ("LLaMA", Touvron et al. 2023, section 2.2) from the named arrays of a checkpoint."""

import math

import numpy as np


def logits(arrays: dict[str, np.ndarray], settings: dict, ids: np.ndarray) -> np.ndarray:
    """Logits of one text, L×V; each weight is (outputs, inputs)."""
    weight = lambda name: arrays[f"{name}.weight"].astype(np.float64)
    x_LxD = weight("model.embed_tokens")[ids]
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        normal = _rms(x_LxD, weight(f"{layer}.input_layernorm"), settings)
        x_LxD = x_LxD + _attention(normal, lambda name, at=layer: weight(f"{at}.self_attn.{name}_proj"), settings)
        normal = _rms(x_LxD, weight(f"{layer}.post_attention_layernorm"), settings)
        gate, up = (normal @ weight(f"{layer}.mlp.{name}_proj").T for name in ("gate", "up"))
        x_LxD = x_LxD + (gate / (1 + np.exp(-gate)) * up) @ weight(f"{layer}.mlp.down_proj").T
    table = "model.embed_tokens" if settings["tie_word_embeddings"] else "lm_head"
    return _rms(x_LxD, weight("model.norm"), settings) @ weight(table).T


def draw(settings: dict) -> dict[str, np.ndarray]:
    """Draws random float32 arrays of a Llama with an untied output head."""
    random = np.random.default_rng(0)
    dim, mlp, vocab = (settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    shared = dim // settings["num_attention_heads"] * settings["num_key_value_heads"]
    layer = {
        f"self_attn.{name}_proj": (rows, dim) for name, rows in (("q", dim), ("k", shared), ("v", shared), ("o", dim))
    }
    layer |= {
        f"mlp.{name}_proj": shape for name, shape in (("gate", (mlp, dim)), ("up", (mlp, dim)), ("down", (dim, mlp)))
    }
    layer |= {f"{name}_layernorm": (dim,) for name in ("input", "post_attention")}
    shapes = {"model.embed_tokens": (vocab, dim), "model.norm": (dim,), "lm_head": (vocab, dim)}
    for i in range(settings["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    draw_weight = lambda shape: (random.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
    return {f"{name}.weight": draw_weight(shape) for name, shape in shapes.items()}


def _rms(x_LxD: np.ndarray, weight_D: np.ndarray, settings: dict) -> np.ndarray:
    return x_LxD / np.sqrt((x_LxD**2).mean(axis=1, keepdims=True) + settings["rms_norm_eps"]) * weight_D


def _attention(x_LxD: np.ndarray, weight, settings: dict) -> np.ndarray:
    heads, shared = settings["num_attention_heads"], settings["num_key_value_heads"]
    q, k, v = (x_LxD @ weight(name).T for name in "qkv")
    width, outs = q.shape[1] // heads, []
    for h in range(heads):
        g = h // (heads // shared)
        queries, keys = q[:, h * width : (h + 1) * width], k[:, g * width : (g + 1) * width]
        queries, keys = (_rotate(x, settings["rope_theta"]) for x in (queries, keys))
        for t in range(len(x_LxD)):
            scores = np.exp(keys[: t + 1] @ queries[t] / math.sqrt(width))
            outs.append(scores / scores.sum() @ v[: t + 1, g * width : (g + 1) * width])
    by_head = np.reshape(outs, (heads, len(x_LxD), width))
    return np.moveaxis(by_head, 0, 1).reshape(len(x_LxD), -1) @ weight("o").T


def _rotate(x_LxK: np.ndarray, theta: float) -> np.ndarray:
    """Rotates dimensions j and j + K/2, taken as complex numbers, by e^(i t θ^(−2j/K))."""
    half = x_LxK.shape[1] // 2
    angles = np.arange(len(x_LxK))[:, None] * theta ** (-np.arange(half) / half)
    rotated = (x_LxK[:, :half] + 1j * x_LxK[:, half:]) * np.exp(1j * angles)
    return np.concatenate([rotated.real, rotated.imag], axis=1)
