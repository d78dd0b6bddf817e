"""Attention in chunks as one float64 matrix over the sequence, with explicit derivatives."""

import math

import numpy as np

FUNCTIONS = {
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "laplace": (
        lambda x: 0.5 * (1 + np.vectorize(math.erf)((x - math.sqrt(0.5)) / (math.sqrt(0.25 / math.pi) * math.sqrt(2)))),
        # A normal distribution's density with the mean √½ and the variance 1 / 4π.
        lambda x: math.sqrt(2) * np.exp(-2 * math.pi * (x - math.sqrt(0.5)) ** 2),
    ),
    "identity": (lambda x: x, np.ones_like),
}


def masks(ids: np.ndarray, chunk: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Two masks, B×L×L: pairs of one document in the same chunk, and those with the key in an earlier chunk."""
    first = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    t = np.arange(ids.shape[1])
    same = (first[:, :, None] == first[:, None]) & (ids > 0)[:, :, None]
    inside = same & (t[:, None] // chunk == t // chunk) & ((t <= t[:, None]) | (not causal))
    return inside, same & (t // chunk < t[:, None] // chunk)


def attend(
    x: dict, ids: np.ndarray, *, chunk: int, causal: bool, function: str, scale: float
) -> tuple[np.ndarray, dict]:
    """Returns the output, and the derivatives of its product with x["d_out"] by each array.

    Args:
        x: q, k, v, d_out, B×H×L×…; divisor, B×L; optionally bias, of the distances 1 − C … C − 1; optionally x, y,
            B×H×L×K, and weight, B×L, of the sum over earlier chunks; optionally decay, B×H×L, each token's log decay of
            the weights inside its chunk, without bias and sum.
        ids: B×L, 0 = padding.
        chunk: C.
        causal: hide later keys.
        function: a name of FUNCTIONS.
        scale: factor of the scores.
    """
    x = {name: np.asarray(array, np.float64) for name, array in x.items()}
    inside, earlier = (mask[:, None] for mask in masks(ids, chunk, causal))
    f, slope = FUNCTIONS[function]
    scores = np.einsum("bhtk,bhuk->bhtu", x["q"], x["k"]) * scale
    t = np.arange(ids.shape[1])
    distance = t - t[:, None]
    if "bias" in x:
        scores += x["bias"][(distance + chunk - 1).clip(0, 2 * chunk - 2)]
    inverse = inside / x["divisor"][:, None, :, None]
    if "decay" in x:
        sums = np.cumsum(x["decay"], axis=2)
        inverse = inverse * np.exp(np.where(inside, sums[..., :, None] - sums[..., None, :], 0))
    matrix = f(scores) * inverse
    if "x" in x:
        weight = earlier * x["weight"][:, None, :, None]
        matrix = matrix + np.einsum("bhtk,bhuk->bhtu", x["x"], x["y"]) * weight
    d_matrix = np.einsum("bhte,bhue->bhtu", x["d_out"], x["v"])
    d_scores = d_matrix * slope(scores) * inverse
    d = {
        "q": np.einsum("bhtu,bhuk->bhtk", d_scores, x["k"]) * scale,
        "k": np.einsum("bhtu,bhtk->bhuk", d_scores, x["q"]) * scale,
        "v": np.einsum("bhtu,bhte->bhue", matrix, x["d_out"]),
    }
    if "bias" in x:
        summed = d_scores.sum(axis=(0, 1))
        d["bias"] = np.array([summed[distance == w].sum() for w in range(1 - chunk, chunk)])
    if "decay" in x:  # a token's decay counts in all pairs around it, and as query
        moved = d_matrix * matrix
        d["decay"] = np.flip(np.cumsum(np.flip(moved.sum(axis=3) - moved.sum(axis=2), axis=2), axis=2), axis=2)
    if "x" in x:
        d["x"] = np.einsum("bhtu,bhuk->bhtk", d_matrix * weight, x["y"])
        d["y"] = np.einsum("bhtu,bhtk->bhuk", d_matrix * weight, x["x"])
    return np.einsum("bhtu,bhue->bhte", matrix, x["v"]), d
