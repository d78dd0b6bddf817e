"""Normalisation layers, one token at a time."""

import math

import numpy as np


def layer_norm(x_D: np.ndarray, p: dict, epsilon: float) -> np.ndarray:
    """(x − mean) / √(variance + ε) · scale + bias (Ba et al. 2016)."""
    mean = sum(x_D) / len(x_D)
    variance = sum((value - mean) ** 2 for value in x_D) / len(x_D)
    return (x_D - mean) / math.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def rms_norm(x_D: np.ndarray, p: dict, epsilon: float) -> np.ndarray:
    """x / √(mean(x²) + ε) · scale (Zhang and Sennrich 2019)."""
    return x_D / math.sqrt(sum(x_D**2) / len(x_D) + epsilon) * p["scale"]


def scale_norm(x_D: np.ndarray, p: dict, epsilon: float) -> np.ndarray:
    """g x / max(‖x‖ / √D, ε)."""
    return p["scale"] * x_D / max(math.sqrt(sum(x_D**2)) / math.sqrt(len(x_D)), epsilon)


NORMS = {"layer": layer_norm, "rms": rms_norm, "scale": scale_norm}


def normalise(name: str, x_LxD: np.ndarray, p: dict, epsilon: float) -> np.ndarray:
    """Normalises each token."""
    return np.stack([NORMS[name](x_D, p, epsilon) for x_D in x_LxD])
