"""Ratios of two models' perplexities on one text, and their errors."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

_FEWEST_BLOCKS = 20  # from which an error is known
_STRETCHES = 5  # of a text: neighbouring blocks are correlated over several of them, stretches of ten hardly


class NoFigureError(ValueError):
    """Why there is no ratio."""


class Ratio(NamedTuple):
    """A ratio, and how far it is known."""

    value: float
    error: float  # half of the 95 % interval of its logarithm

    @property
    def ends(self) -> tuple[float, float]:
        """Of its 95 % interval."""
        return self.value * math.exp(-self.error), self.value * math.exp(self.error)

    def is_within(self, low: float, high: float) -> bool | None:
        """Whether it is; None: its interval has one of the ends."""
        if any(self.ends[0] <= end <= self.ends[1] for end in (low, high)):
            return None
        return low < self.value < high


def ratio_of(one_N: np.ndarray, other_N: np.ndarray, tokens_N: np.ndarray) -> Ratio:
    """Of two models' perplexities, from their negative log-likelihoods on N blocks that follow each other in a text.

    The error is that of a ratio of sums over a few long stretches of the text, with Student's t (Cochran 1977,
    "Sampling Techniques", section 6.4).

    Raises:
        NoFigureError: a score is not finite, or there are too few blocks.
    """
    if not (np.isfinite(one_N).all() and np.isfinite(other_N).all()):
        raise NoFigureError("a score is not finite")
    if len(tokens_N) < _FEWEST_BLOCKS:
        raise NoFigureError(f"scored in {len(tokens_N)} blocks of text, too few to know its error")
    of_stretches = lambda blocks: np.array([part.sum() for part in np.array_split(blocks, _STRETCHES)])
    differences, tokens = of_stretches(one_N - other_N), of_stretches(tokens_N)
    mean = differences.sum() / tokens.sum()
    square = _STRETCHES / (_STRETCHES - 1) * np.square(differences - mean * tokens).sum()
    return Ratio(math.exp(mean), float(stdtrit(_STRETCHES - 1, 0.975)) * math.sqrt(square) / tokens.sum())


def over_seeds(ratios: Sequence[float]) -> Ratio:
    """The geometric mean of two or more ratios, with the interval of Student's t for their logarithms."""
    logs = np.log(ratios)
    a_half = stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / math.sqrt(len(logs))
    return Ratio(math.exp(logs.mean()), float(a_half))


def loss_at(curve: Sequence[tuple[float, np.ndarray]], time: float) -> np.ndarray:
    """The loss at a time, on the polynomial through all points of a curve over the logarithm of time.

    A straight line between two points would lie above losses that fall ever more slowly, by a percent of perplexity at
    budgets that double.

    Args:
        curve: two or three times and losses (of any shape, such as one of each block) of runs that were annealed.
        time: within those of the curve.

    Raises:
        NoFigureError: the time is not within those of the curve.
    """
    times = [at for at, _ in curve]
    if not min(times) <= time <= max(times):
        raise NoFigureError(f"{time:.3g} is not within the {min(times):.3g} to {max(times):.3g} of the curve")
    weight = lambda at: math.prod(math.log(time / other) / math.log(at / other) for other in times if other != at)
    return np.sum([weight(at) * loss for at, loss in curve], axis=0)
