"""From the scores of one query's visible keys to their weights."""

import math

import numpy as np


def relu2(score: float) -> float:
    """FLASH, eq. 4."""
    return score * score if score > 0 else 0.0


def laplace(score: float) -> float:
    """Mega: mean √½ and standard deviation √(1 / 4π) of the normal distribution whose probability it is."""
    mean, deviation = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
    return (1 + math.erf((score - mean) / (deviation * math.sqrt(2)))) / 2


def weights(function: str, scores: list[float], n: float) -> np.ndarray:
    """f(score) / n of each key; softmax has a denominator of its own."""
    if function == "softmax":
        top = max(scores)
        exponentials = [math.exp(score - top) for score in scores]
        return np.array(exponentials) / sum(exponentials)
    f = {"relu2": relu2, "laplace": laplace}[function]
    return np.array([f(score) / n for score in scores])
