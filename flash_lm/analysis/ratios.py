"""Ratios of two models' perplexities on one text, and their errors."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

NORMAL_95 = 1.959964  # standard deviations of a normal distribution that hold 95 % of it
_FEWEST_BLOCKS = 20  # from which an error is known
_LAGS = 3  # between blocks that may be of one document; 4 (n / 100)^(2/9) for 50 blocks (Newey and West 1994)


class NoFigureError(ValueError):
    """Why there is no ratio."""


class Ratio(NamedTuple):
    """A ratio, and how far it is known."""

    value: float
    error: float  # half of the 95 % interval of its logarithm

    def is_within(self, low: float, high: float) -> bool | None:
        """Whether it is; None: its interval has one of the ends."""
        ends = self.value * math.exp(-self.error), self.value * math.exp(self.error)
        if any(ends[0] <= end <= ends[1] for end in (low, high)):
            return None
        return low < self.value < high


def ratio_of(one_N: np.ndarray, other_N: np.ndarray, tokens_N: np.ndarray) -> Ratio:
    """Of two models' perplexities, from their negative log-likelihoods on N blocks that follow each other in a text.

    The error is that of a ratio of sums (Cochran 1977, "Sampling Techniques", section 6.4). Neighbours are not
    independent: covariances of blocks up to three apart count with falling weights (Newey and West 1987).

    Raises:
        NoFigureError: there are too few blocks.
    """
    if len(tokens_N) < _FEWEST_BLOCKS:
        raise NoFigureError(f"scored in {len(tokens_N)} blocks of text, too few to know its error")
    differences_N, count, total = one_N - other_N, len(tokens_N), tokens_N.sum()
    mean = differences_N.sum() / total
    rest_N = differences_N - mean * tokens_N
    alike = [2 * (1 - lag / (_LAGS + 1)) * rest_N[lag:] @ rest_N[:-lag] for lag in range(1, _LAGS + 1)]
    square = count / (count - 1) * (rest_N @ rest_N + sum(alike))
    return Ratio(math.exp(mean), NORMAL_95 * math.sqrt(square) / total)


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
