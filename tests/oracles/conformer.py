"""The Conformer's sublayers besides attention (Gulati et al. 2020, section 2), with a norm by token for the batch's."""

import numpy as np

from oracles.attention import Row, silu
from oracles.convolution import convolve
from oracles.norms import normalise


def half_step(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """½ swish(x W_up) W_down."""
    return 0.5 * (silu(x_LxD @ p["up"]["kernel"]) @ p["down"]["kernel"])


def closing_half_step(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Norm(x + ½ FFN(Norm(x)))."""
    normal = normalise(settings.norm, x_LxD, p["norm"], settings.norm_epsilon)
    moved = x_LxD + half_step(normal, p, row, settings)
    return normalise(settings.norm, moved, p["closing_norm"], settings.norm_epsilon)


def convolution_module(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """swish(Norm(depthwise(GLU(x)))) W."""
    glu = x_LxD @ p["value"]["kernel"] / (1 + np.exp(-x_LxD @ p["gate"]["kernel"]))
    convolved = convolve(glu, p["convolutions"]["value"], row.sees, settings.causal)
    normal = normalise(settings.norm, convolved, p["norm"], settings.norm_epsilon)
    return silu(normal) @ p["output"]["kernel"]
