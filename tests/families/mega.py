"""Mega's unit token by token (Ma et al. 2022, "Mega: Moving Average Equipped Gated Attention", eq. 6–15)."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row, rotated, silu
from oracles.feed_forward import MLP
from oracles.mixed_chunks import local_part
from oracles.norms import normalise
from oracles.row import Family, Sublayer


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


def _maps(s: SimpleNamespace) -> int:
    return s.model_dim * (3 * s.mega.expanded_dim + s.mega.shared_dim + 2 * s.model_dim)


def _sums(s: SimpleNamespace) -> int:
    return (1 if s.causal else 2) * s.model_dim * s.mega.ema_dim


def _parameters(s: SimpleNamespace) -> int:
    """With two scales and offsets, a bias, a number a channel for the token itself, and four for each of its sums."""
    bias = counting.bias(s.mega, s.chunks.size * (1 + s.chunks.overlapping))
    return _maps(s) + 4 * s.mega.shared_dim + bias + s.model_dim + 4 * _sums(s)


def _flops(s: SimpleNamespace, length: int) -> int:
    """Pairs inside a chunk; every token enters its channels' sums and reads them."""
    chunk = lambda t: t // s.chunks.size
    inside = sum(abs(chunk(t) - chunk(u)) <= s.chunks.overlapping for t, u in counting.pairs(s, length))
    of_pairs = inside * (s.mega.shared_dim + s.mega.expanded_dim)
    return 2 * (length * _maps(s) + of_pairs + length * 2 * _sums(s))


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
        counted=False,  # the averages are a loop
        constant_state=True,
        rounded_state=(".core",),
        forgets=True,
        starts_fixed=("variants", "shift", "core/log_rate", "core/bonus"),
        ends_with_map=False,
        one_chunk={"chunks.size": 32},  # one chunk of the attention, but two of the averages
    )
}
