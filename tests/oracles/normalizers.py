"""`model.normalizer` and `model.divides`: the factor of the scores and what divides weights and sums.

N is the number of keys that the query sees (count), the row's length (length), or an integer. It divides the weights
and the sums over chunks (weights: f(q kᵀ/√s + b) / N), or the scores (f(q kᵀ/N + b)), and the sums are means then.
length_everywhere: the row's length divides scores and sums.
"""

import math


def divides_scores(settings) -> bool:
    return settings.divides == "scores" or settings.normalizer == "length_everywhere"


def score_factor(settings, function: str, width: int, n: int) -> float:
    """Factor of q·k; `n`: N of the scores, see `of_row`. Softmax is scaled as ever."""
    return 1 / n if divides_scores(settings) and function != "softmax" else 1 / math.sqrt(width)


def of_row(settings, length: int) -> int:
    """N of the scores of a row of this length; a count is none."""
    return length if settings.normalizer in ("count", "length", "length_everywhere") else int(settings.normalizer)


def quadratic(settings, visible: int, length: int) -> float:
    """Divisor of weights over the row."""
    if divides_scores(settings):
        return 1
    return {"count": visible, "length": length}.get(settings.normalizer) or int(settings.normalizer)


def local(settings, visible: int, chunk_size: int) -> float:
    """Divisor of weights inside a chunk: a constant of the row's length says nothing here, so it is C."""
    return 1 if divides_scores(settings) else {"count": visible}.get(settings.normalizer, chunk_size)


def linear(settings, visible: int, length: int) -> float:
    """Divisor of the part without f."""
    if settings.normalizer == "length_everywhere":
        return length
    if settings.divides == "scores":
        return visible
    return {"count": visible, "length": length}.get(settings.normalizer) or int(settings.normalizer)
