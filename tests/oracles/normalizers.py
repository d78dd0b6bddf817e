"""`model.normalizer`: the factor of the scores and the divisor N (DESIGN: relu²(q kᵀ/√s + b) / N).

count: N = keys that the query sees · an integer: N · length: N = the row's length · paper: the appendix's
relu²(q kᵀ/n + b), which has n inside f and no divisor.
"""

import math


def score_factor(normalizer: str, function: str, width: int, length: int) -> float:
    """Factor of q·k; `length` is n of the appendix. Softmax is scaled as ever."""
    return 1 / length if normalizer == "paper" and function != "softmax" else 1 / math.sqrt(width)


def quadratic(normalizer: str, visible: int, length: int) -> float:
    """N of attention over the row."""
    return {"count": visible, "length": length, "paper": 1}.get(normalizer) or int(normalizer)


def local(normalizer: str, visible: int, chunk_size: int) -> float:
    """N of attention inside a chunk: a constant of the row's length says nothing here, so it is C."""
    return {"count": visible, "paper": 1}.get(normalizer, chunk_size)


def linear(normalizer: str, visible: int, length: int) -> float:
    """N of the part without f: what the appendix puts inside f divides the sum here."""
    return {"count": visible, "length": length, "paper": length}.get(normalizer) or int(normalizer)
