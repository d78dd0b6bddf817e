"""MLP with GELU, and GLU with Swish."""

import math

import numpy as np

from oracles.attention import Row, silu
from oracles.row import Sublayer


def gelu(x: np.ndarray) -> np.ndarray:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """gelu(x W_up) W_down."""
    return gelu(x_LxD @ p["up"]["kernel"]) @ p["down"]["kernel"]


def glu(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """(silu(x W_gate) ⊙ x W_up) W_down."""
    return (silu(x_LxD @ p["gate"]["kernel"]) * (x_LxD @ p["up"]["kernel"])) @ p["down"]["kernel"]


MLP = Sublayer(mlp, lambda s: 2 * s.model_dim * s.mlp_dim, lambda s, length: 2 * length * 2 * s.model_dim * s.mlp_dim)
GLU = Sublayer(glu, lambda s: 3 * s.model_dim * s.mlp_dim, lambda s, length: 2 * length * 3 * s.model_dim * s.mlp_dim)
