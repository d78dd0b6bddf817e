"""Attention functions: the weights of one query's visible keys from their scores."""

import math

import numpy as np


def relu2(score: float) -> float:
    """relu(score)² (FLASH, eq. 4)."""
    return score * score if score > 0 else 0.0


def laplace(score: float) -> float:
    """Distribution function of a normal distribution with mean √½ and standard deviation √(1 / 4π) (Mega)."""
    mean, deviation = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
    return (1 + math.erf((score - mean) / (deviation * math.sqrt(2)))) / 2


def weights(function: str, scores: list[float], n: float) -> np.ndarray:
    """Returns f(score) / n for each key; softmax divides by its sum of exponentials instead."""
    if function == "softmax":
        top = max(scores)
        exponentials = [math.exp(score - top) for score in scores]
        return np.array(exponentials) / sum(exponentials)
    f = {"relu2": relu2, "laplace": laplace}[function]
    return np.array([f(score) / n for score in scores])
