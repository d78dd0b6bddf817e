"""Mega's unit token by token (Ma et al. 2022, "Mega: Moving Average Equipped Gated Attention", eq. 6–15)."""

import numpy as np

from oracles.attention import Row, rotated, silu
from oracles.mixed_chunks import local_part
from oracles.norms import normalise


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def averaged(x_LxD: np.ndarray, p: dict, way: int, places: list[int], row: Row) -> np.ndarray:
    """Σ_n γ_n h_n / √N with h_n = (1 − pα) h_n + p β x, over the document in the order of `places`."""
    damping, decay = sigmoid(p["damping"][way]), sigmoid(p["decay"][way])
    found, sums, last = np.zeros_like(x_LxD), np.zeros_like(damping), None
    for t in places:
        if row.sees(t, t):
            if last is None or not row.sees(max(t, last), min(t, last)):
                sums = np.zeros_like(damping)
            sums = (1 - damping * decay) * sums + damping * p["into"][way] * x_LxD[t][:, None]
            found[t] = (p["out"][way] * sums).sum(axis=1) / np.sqrt(damping.shape[1])
            last = t
    return found


def mega(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """x + σ(u) ⊙ (silu(c + (A V ⊙ silu(r)) W_o) − x) with softmax(q kᵀ / √S + b) over the query's chunk."""
    normal, places = normalise(settings.norm, x_LxD, p["norm"], settings.norm_epsilon), list(range(len(x_LxD)))
    ema, own = p["convolutions"], settings.mega
    moved = averaged(normal, ema, 0, places, row)
    if not settings.causal:
        moved += averaged(normal, ema, 1, places[::-1], row)
    moved = silu(moved + ema["own"] * normal)
    z = silu(moved @ p["shared"]["kernel"])
    variants = zip(p["variants"]["scale"], p["variants"]["offset"], strict=True)
    q, k = (rotated(z * scale + offset, row, settings) for scale, offset in variants)
    v, bias = silu(normal @ p["value"]["kernel"]), {"bias_name": own.relative_bias, "bias_p": p["core"].get("bias")}
    mixed = local_part(q, k, v, row, settings, function=own.attention_function, **bias)
    gated = mixed * silu(moved @ p["gate"]["kernel"])
    proposed = silu(moved @ p["candidate"]["kernel"] + gated @ p["output"]["kernel"])
    return x_LxD + sigmoid(moved @ p["update"]["kernel"]) * (proposed - x_LxD)
