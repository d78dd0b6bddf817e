"""Llama as its checkpoints have it ("LLaMA", Touvron et al. 2023, section 2.2), from a file's arrays by their names."""

import math

import numpy as np


def logits(arrays: dict[str, np.ndarray], settings: dict, ids: np.ndarray) -> np.ndarray:
    """L×V of one text; each weight is (outputs, inputs)."""
    take = lambda name: arrays[f"{name}.weight"].astype(np.float64)
    x_LxD = take("model.embed_tokens")[ids]
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        normal = _rms(x_LxD, take(f"{layer}.input_layernorm"), settings)
        x_LxD = x_LxD + _attention(normal, lambda name, at=layer: take(f"{at}.self_attn.{name}_proj"), settings)
        normal = _rms(x_LxD, take(f"{layer}.post_attention_layernorm"), settings)
        gate, up = (normal @ take(f"{layer}.mlp.{name}_proj").T for name in ("gate", "up"))
        x_LxD = x_LxD + (gate / (1 + np.exp(-gate)) * up) @ take(f"{layer}.mlp.down_proj").T
    table = "model.embed_tokens" if settings["tie_word_embeddings"] else "lm_head"
    return _rms(x_LxD, take("model.norm"), settings) @ take(table).T


def draw(settings: dict) -> dict[str, np.ndarray]:
    """Float32 arrays of such a model, with a head of its own."""
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
    drawn = lambda shape: (random.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
    return {f"{name}.weight": drawn(shape) for name, shape in shapes.items()}


def _rms(x_LxD: np.ndarray, weight_D: np.ndarray, settings: dict) -> np.ndarray:
    return x_LxD / np.sqrt((x_LxD**2).mean(axis=1, keepdims=True) + settings["rms_norm_eps"]) * weight_D


def _attention(x_LxD: np.ndarray, take, settings: dict) -> np.ndarray:
    heads, shared = settings["num_attention_heads"], settings["num_key_value_heads"]
    q, k, v = (x_LxD @ take(name).T for name in "qkv")
    width, outs = q.shape[1] // heads, []
    for h in range(heads):
        g = h // (heads // shared)
        queries, keys = q[:, h * width : (h + 1) * width], k[:, g * width : (g + 1) * width]
        queries, keys = (_rotated(x, settings["rope_theta"]) for x in (queries, keys))
        for t in range(len(x_LxD)):
            scores = np.exp(keys[: t + 1] @ queries[t] / math.sqrt(width))
            outs.append(scores / scores.sum() @ v[: t + 1, g * width : (g + 1) * width])
    by_head = np.reshape(outs, (heads, len(x_LxD), width))
    return np.moveaxis(by_head, 0, 1).reshape(len(x_LxD), -1) @ take("o").T


def _rotated(x_LxK: np.ndarray, theta: float) -> np.ndarray:
    """Pairs of dimension j and j + K/2 as complex numbers, turned by e^(i t θ^(−2j/K))."""
    half = x_LxK.shape[1] // 2
    angles = np.arange(len(x_LxK))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x_LxK[:, :half] + 1j * x_LxK[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)
