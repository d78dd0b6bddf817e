"""The Performer: softmax by positive random features (Choromanski et al. 2020, section 2)."""

import math
from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row
from oracles.feed_forward import MLP
from oracles.linear import attend_by_logs
from oracles.row import Family, Sublayer


def favor_logs(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """log φ(x), φ(x) = exp(ω·x' − ‖x'‖²/2) with x' = x / K^¼ ("Rethinking Attention with Performers", lemma 1)."""
    scaled = x / len(x) ** 0.25
    return np.array([omega @ scaled - scaled @ scaled / 2 for omega in frequencies])


def favor_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o with the features of ω."""
    return attend_by_logs(x_LxD, p, row, settings, lambda x: favor_logs(x, p["core"]["frequencies"]))


def _features(s: SimpleNamespace) -> int:
    """K ln K of a head's width K, rounded up to a multiple of 8."""
    width = s.model_dim // s.num_heads
    return next(count for count in range(8, 10_000, 8) if count >= width * math.log(width))


def _flops(s: SimpleNamespace, length: int) -> int:
    """Includes the products of the random features."""
    width, features = s.model_dim // s.num_heads, s.favor.features
    sums = counting.linear_sums(s, length, features, width + 1)
    return 2 * length * 4 * s.model_dim**2 + 2 * s.num_heads * (2 * features * width * length + sums)


FAVOR = Sublayer(favor_attention, lambda s: 4 * s.model_dim**2, _flops, lambda s: 3 * s.model_dim)
ROWS = {
    "performer": Family(
        (FAVOR, MLP),
        absolute="learned",
        defaults={"favor.features": _features},
        constant_state=True,
        one_pass=True,
        growth="linear",
        ill_conditioned=("causal", "bidirectional"),  # exponents of several thousand, exact to 1e-4 in float32
        recomputes_products=True,
    )
}
