"""Ratios of two models' scores: their geometric mean over seeds with a 95 % interval, and losses at a given time."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtrit

SEEDS = 3  # that a verdict needs
STRETCHES = 5  # of a text or a timing: neighbouring blocks are correlated over several of them, stretches hardly
_ROUNDING = 1e-30  # least variance of a logarithm: that of rounding
_QUANTILES = 50  # of each variance, over which a power is a mean


class NoFigureError(ValueError):
    """Raised where no ratio can be computed; the message says why."""


class Variance(NamedTuple):
    """Variance of a mean of logarithms, with its degrees of freedom; both may be arrays."""

    value: Any
    freedom: Any


def variance_of_mean(values: Sequence[float] | np.ndarray) -> Variance:
    """Returns the variance of the mean of two or more independent values, s² / n.

    >>> variance_of_mean([1.0, 3.0])
    Variance(value=1.0, freedom=1)
    """
    return Variance(float(np.var(values, ddof=1)) / len(values), len(values) - 1)


def variance_of_text(differences_N: np.ndarray, tokens_N: np.ndarray) -> Variance:
    """Returns the variance of a mean difference of losses per token, from N consecutive blocks of a text.

    The mean is a ratio of sums over a few long stretches of the text (Cochran 1977, "Sampling Techniques", section
    6.4).
    """
    sum_stretches = lambda blocks: np.array([part.sum() for part in np.array_split(blocks, STRETCHES)])
    differences, tokens = sum_stretches(differences_N), sum_stretches(tokens_N)
    mean = differences.sum() / tokens.sum()
    square = STRETCHES / (STRETCHES - 1) * np.square(differences - mean * tokens).sum()
    return Variance(float(square / tokens.sum() ** 2), STRETCHES - 1)


@dataclasses.dataclass(frozen=True)
class MeanRatio:
    """Geometric mean of a ratio over seeds, with its 95 % interval.

    The variance of the mean's logarithm is the sum of the variance of the mean over seeds and of errors that all seeds
    share; more seeds do not reduce the latter. The interval is Student's t with Welch–Satterthwaite degrees of freedom.
    It is never narrower than the interval of one source alone: a small second source would add degrees of freedom and
    so narrow it. By simulation it contains the true value in 94.6 to 96.8 % of cases.

    Attributes:
        logs: logarithms of the ratios, one per seed.
        shared: variances that all seeds share, by source.
    """

    logs: Sequence[float] | np.ndarray
    shared: Mapping[str, Variance]

    @property
    def ratios(self) -> list[float]:
        """The ratio of each seed."""
        return np.exp(self.logs).tolist()

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(np.mean(self.logs))

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the 95 % interval; needs two seeds."""
        half = float(_half_width(self._sources(len(self.logs))))
        return self.mean * math.exp(-half), self.mean * math.exp(half)

    @property
    def shares(self) -> dict[str, float]:
        """Each source's share of the variance; needs two seeds."""
        sources = self._sources(len(self.logs))
        total = _sum(sources).value
        return {name: source.value / total for name, source in sources.items()}

    def is_within(self, low: float, high: float) -> bool | None:
        """Returns True if all of the interval is within [low, high], False if none of it is.

        None: undecided, or too few seeds. This is the verdict on every ratio.
        """
        if len(self.logs) < SEEDS:
            return None
        least, most = self.interval
        if low <= least and most <= high:
            return True
        return False if most < low or least > high else None

    def power(self, low: float, high: float, seeds: int) -> float:
        """Returns the probability of a verdict, either way, with this number of seeds.

        It assumes that the true mean and variances are the observed ones (a few seeds estimate them poorly), that
        errors are normal, and that each variance is estimated again as a χ². With one source, (limit - mean) / error
        is then a noncentral t. The result is a mean over quantiles of each χ².
        """
        sources = self._sources(seeds)
        error, (least, most) = math.sqrt(_sum(sources).value), (_log(x) - np.mean(self.logs) for x in (low, high))
        drawn = np.meshgrid(*(x.value * _chi_square_quantiles(x.freedom) for x in sources.values()))
        pairs = zip(sources.items(), drawn, strict=True)
        halves = _half_width({name: Variance(values, source.freedom) for (name, source), values in pairs})
        inside = np.maximum(ndtr((most - halves) / error) - ndtr((least + halves) / error), 0)
        outside = ndtr((least - halves) / error) + ndtr((-most - halves) / error)
        return float(np.mean(inside + outside))

    def text(self, of: str) -> str:
        """Returns the ratios over those `of` another model, with the interval, in words."""
        ratios = f"{spread(self.ratios)} {of}"
        if len(self.logs) < 2:
            return ratios
        known = "95 %: {:.3f} to {:.3f}".format(*self.interval)
        if self.shared:
            shares = (f"{100 * share:.0f} % {name}" for name, share in self.shares.items())
            known += f"; of the variance {', '.join(shares)}"
        return f"{ratios} ({known})"

    def _sources(self, seeds: int) -> dict[str, Variance]:
        """Returns the variances of the mean over this number of seeds, by source."""
        of_one = float(np.var(self.logs, ddof=1))
        return {"seeds": Variance(of_one / seeds, seeds - 1), **self.shared}


def _sum(sources: Mapping[str, Variance]) -> Variance:
    """Returns the sum of the variances with Welch–Satterthwaite degrees of freedom."""
    parts = [np.maximum(source.value, _ROUNDING) for source in sources.values()]
    squares = [part**2 / source.freedom for part, source in zip(parts, sources.values(), strict=True)]
    return Variance(sum(parts), sum(parts) ** 2 / sum(squares))


def _half_width(sources: Mapping[str, Variance]) -> np.ndarray:
    """Returns the half width of the 95 % interval: that of the sum, or of one source if that is wider."""
    widths = [stdtrit(x.freedom, 0.975) * np.sqrt(x.value) for x in (_sum(sources), *sources.values())]
    return np.max(widths, axis=0)


def _chi_square_quantiles(freedom: float) -> np.ndarray:
    """Returns equally likely quantiles of a χ², divided by its degrees of freedom."""
    return 2 * gammaincinv(freedom / 2, (np.arange(_QUANTILES) + 0.5) / _QUANTILES) / freedom


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def spread(ratios: Sequence[float]) -> str:
    """Formats the geometric mean of the ratios of seeds, with the smallest and largest.

    >>> spread([0.5, 2.0])
    '1.000 (0.500–2.000, 2 seeds) ×'
    """
    middle = statistics.geometric_mean(ratios)
    if len(ratios) == 1:
        return f"{middle:.3f} (one seed) ×"
    return f"{middle:.3f} ({min(ratios):.3f}–{max(ratios):.3f}, {len(ratios)} seeds) ×"


def loss_at(curve: Sequence[tuple[float, np.ndarray]], time: float) -> np.ndarray:
    """Interpolates a loss curve at a time: Lagrange's polynomial in log(time) through all points.

    A straight line between two points would lie above a convex curve, by one percent of perplexity at budgets that
    double.

    Args:
        curve: two or three pairs of time and loss (any shape, such as one per block) of annealed runs.
        time: a time between the first and the last of the curve.

    Raises:
        NoFigureError: the time is outside the curve.
    """
    times = [at for at, _ in curve]
    if not min(times) <= time <= max(times):
        raise NoFigureError(f"{time:.5g} is not within the {min(times):.5g} to {max(times):.5g} of the curve")
    weight = lambda at: math.prod(math.log(time / other) / math.log(at / other) for other in times if other != at)
    return np.sum([weight(at) * loss for at, loss in curve], axis=0)
