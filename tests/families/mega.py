"""Mega's unit token by token (Ma et al. 2022, "Mega: Moving Average Equipped Gated Attention", eq. 6–15)."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, apply_rotary, silu
from oracles.feed_forward import MLP
from oracles.mixed_chunks import local_part
from oracles.norms import normalise
from oracles.row import Family, Sublayer


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def moving_average(x_LxD: np.ndarray, p: dict, way: int, order: list[int], row: Row) -> np.ndarray:
    """Σ_n γ_n h_n / √N with h_n = (1 − pα) h_n + p β x, over each document in this order."""
    damping, decay = sigmoid(p["damping"][way]), sigmoid(p["decay"][way])
    averages, sums, last = np.zeros_like(x_LxD), np.zeros_like(damping), None
    for t in order:
        if row.sees(t, t):
            if last is None or not row.sees(max(t, last), min(t, last)):
                sums = np.zeros_like(damping)
            sums = (1 - damping * decay) * sums + damping * p["into"][way] * x_LxD[t][:, None]
            averages[t] = (p["out"][way] * sums).sum(axis=1) / np.sqrt(damping.shape[1])
            last = t
    return averages


def mega(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """x + σ(u) ⊙ (silu(c + (A V ⊙ silu(r)) W_o) − x) with softmax(q kᵀ / √S + b) over the query's chunk."""
    normal, order = normalise(settings.norm, x_LxD, p["norm"], settings.norm_epsilon), list(range(len(x_LxD)))
    ema, options = p["convolutions"], settings.mega
    smoothed = moving_average(normal, ema, 0, order, row)
    if not settings.causal:
        smoothed += moving_average(normal, ema, 1, order[::-1], row)
    smoothed = silu(smoothed + ema["own"] * normal)
    z = silu(smoothed @ p["shared"]["kernel"])
    variants = zip(p["variants"]["scale"], p["variants"]["offset"], strict=True)
    q, k = (apply_rotary(z * scale + offset, row, settings) for scale, offset in variants)
    v, bias = silu(normal @ p["value"]["kernel"]), {"bias_name": options.relative_bias, "bias_p": p["core"].get("bias")}
    mixed = local_part(q, k, v, row, settings, function=options.attention_function, **bias)
    gated = mixed * silu(smoothed @ p["gate"]["kernel"])
    proposed = silu(smoothed @ p["candidate"]["kernel"] + gated @ p["output"]["kernel"])
    return x_LxD + sigmoid(smoothed @ p["update"]["kernel"]) * (proposed - x_LxD)


def _maps(s: SimpleNamespace) -> int:
    return s.model_dim * (3 * s.mega.expanded_dim + s.mega.shared_dim + 2 * s.model_dim)


def _sums(s: SimpleNamespace) -> int:
    return (1 if s.causal else 2) * s.model_dim * s.mega.ema_dim


def _parameters(s: SimpleNamespace) -> int:
    """Maps, two scales and offsets, a bias, a weight per channel for the token itself, and four per moving average."""
    bias = counting.bias_parameters(s.mega, s.chunks.size * (1 + s.chunks.overlapping))
    return _maps(s) + 4 * s.mega.shared_dim + bias + s.model_dim + 4 * _sums(s)


def _flops(s: SimpleNamespace, length: int) -> int:
    """Maps, pairs inside a chunk, and two products per token and moving average."""
    chunk = lambda t: t // s.chunks.size
    inside = sum(abs(chunk(t) - chunk(u)) <= s.chunks.overlapping for t, u in counting.visible_pairs(s, length))
    pair_products = inside * (s.mega.shared_dim + s.mega.expanded_dim)
    return 2 * (length * _maps(s) + pair_products + length * 2 * _sums(s))


MEGA = Sublayer(mega, _parameters, _flops, owns_residual=True)
ROWS = {
    "mega": Family(
        (MEGA, MLP),
        defaults={
            "mlp_dim": lambda s: 2 * s.model_dim,
            "mega.expanded_dim": lambda s: 2 * s.model_dim,
            "mega.shared_dim": lambda s: 2 * max(1, s.model_dim // 8),
        },
        small={"mega.ema_dim": 3},
        letters=lambda s: {"E": 2 * s.model_dim, "Z": s.model_dim // 8 * 2, "I": s.mega.ema_dim},
        xla_counts_flops=False,  # the averages are a loop
        constant_state=True,
        rounded_state=(".core",),
        decays=True,
        fixed_init=("variants", "shift", "core/log_rate", "core/bonus"),
        ends_with_map=False,
        one_chunk={"chunks.size": 32},  # one chunk of the attention, but two of the averages
    )
}
