"""`model.normalizer`: the factor of the scores and the divisor N (DESIGN: relu²(q kᵀ/√s + b) / N).

count: N = keys that the query sees · an integer: N · length: N = the row's length · paper: the appendix's
relu²(q kᵀ/n + b), which has n inside f and no divisor · paper_N: the same where n of a row is always N, and a mean of
the part without f.
"""

import math


def score_factor(normalizer: str, function: str, width: int, n: int) -> float:
    """Factor of q·k; `n` is that of the appendix, see `of_row`. Softmax is scaled as ever."""
    return 1 / n if normalizer.startswith("paper") and function != "softmax" else 1 / math.sqrt(width)


def of_row(normalizer: str, length: int) -> int:
    """n of the appendix for a row of this length."""
    return int(normalizer[6:]) if normalizer.startswith("paper_") else length


def quadratic(normalizer: str, visible: int, length: int) -> float:
    """N of attention over the row."""
    if normalizer.startswith("paper"):
        return 1
    return {"count": visible, "length": length}.get(normalizer) or int(normalizer)


def local(normalizer: str, visible: int, chunk_size: int) -> float:
    """N of attention inside a chunk: a constant of the row's length says nothing here, so it is C."""
    return 1 if normalizer.startswith("paper") else {"count": visible}.get(normalizer, chunk_size)


def linear(normalizer: str, visible: int, length: int) -> float:
    """N of the part without f: what the appendix puts inside f divides the sum here."""
    means = normalizer == "count" or normalizer.startswith("paper_")
    return visible if means else {"length": length, "paper": length}.get(normalizer) or int(normalizer)
