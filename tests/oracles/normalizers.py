"""`model.normalizer` and `model.divides`: the factor of the scores, and the divisors of weights and sums.

N is the number of keys that the query sees (count), the sequence length (length), or an integer. It divides the weights
and the sums over chunks (weights: f(q kᵀ/√s + b) / N), or the scores (f(q kᵀ/N + b)); then the sums are means.
length_everywhere: the sequence length divides scores and sums.
"""

import math


def divides_scores(settings) -> bool:
    return settings.divides == "scores" or settings.normalizer == "length_everywhere"


def score_factor(settings, function: str, width: int, n: int) -> float:
    """Factor of q·k; `n` is N of the scores, see `sequence_length_divisor`. Softmax always has 1/√width."""
    return 1 / n if divides_scores(settings) and function != "softmax" else 1 / math.sqrt(width)


def sequence_length_divisor(settings, length: int) -> int:
    """N of the scores for a sequence of this length; with `count` it is the length."""
    return length if settings.normalizer in ("count", "length", "length_everywhere") else int(settings.normalizer)


def quadratic(settings, visible: int, length: int) -> float:
    """Divisor of attention weights over the sequence."""
    if divides_scores(settings):
        return 1
    return {"count": visible, "length": length}.get(settings.normalizer) or int(settings.normalizer)


def local(settings, visible: int, chunk_size: int) -> float:
    """Divisor of attention weights inside a chunk: the chunk size C unless keys are counted."""
    return 1 if divides_scores(settings) else {"count": visible}.get(settings.normalizer, chunk_size)


def linear(settings, visible: int, length: int) -> float:
    """Divisor of the linear part."""
    if settings.normalizer == "length_everywhere":
        return length
    if settings.divides == "scores":
        return visible
    return {"count": visible, "length": length}.get(settings.normalizer) or int(settings.normalizer)
