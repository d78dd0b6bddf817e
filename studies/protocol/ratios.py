"""Ratios of two models' scores: their mean over seeds with one interval, and losses read at one time."""

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
    """Why there is no ratio."""


class Variance(NamedTuple):
    """Of a mean of logarithms, with its degrees of freedom; or several."""

    value: Any
    freedom: Any


def variance_of_mean(values: Sequence[float] | np.ndarray) -> Variance:
    """Of the mean of two or more independent values."""
    return Variance(float(np.var(values, ddof=1)) / len(values), len(values) - 1)


def variance_of_text(differences_N: np.ndarray, tokens_N: np.ndarray) -> Variance:
    """Of a mean difference of losses per token, from N blocks that follow each other in a text.

    It is that of a ratio of sums over a few long stretches of the text (Cochran 1977, "Sampling Techniques", section
    6.4).
    """
    of_stretches = lambda blocks: np.array([part.sum() for part in np.array_split(blocks, STRETCHES)])
    differences, tokens = of_stretches(differences_N), of_stretches(tokens_N)
    mean = differences.sum() / tokens.sum()
    square = STRETCHES / (STRETCHES - 1) * np.square(differences - mean * tokens).sum()
    return Variance(float(square / tokens.sum() ** 2), STRETCHES - 1)


@dataclasses.dataclass(frozen=True)
class MeanRatio:
    """The geometric mean of a ratio over seeds, and its 95 % interval.

    The logarithm of the mean has one variance: that of the mean of the seeds, and errors that all seeds share and that
    more seeds do not make smaller. The interval is that of Student's t, with degrees of freedom by Welch and
    Satterthwaite, but never narrower than that of one source alone: a small second source would add degrees of freedom
    and so narrow it. By simulation it holds the truth in 94.6 to 96.8 % of cases.

    Attributes:
        logs: logarithms of the ratios, one or more, of a seed each.
        shared: the variances that all seeds share, by name.
    """

    logs: Sequence[float] | np.ndarray
    shared: Mapping[str, Variance]

    @property
    def ratios(self) -> list[float]:
        """Of each seed."""
        return np.exp(self.logs).tolist()

    @property
    def mean(self) -> float:
        """Geometric."""
        return math.exp(np.mean(self.logs))

    @property
    def ends(self) -> tuple[float, float]:
        """Of the interval; needs two seeds."""
        half = float(_half(self._sources(len(self.logs))))
        return self.mean * math.exp(-half), self.mean * math.exp(half)

    @property
    def shares(self) -> dict[str, float]:
        """Of the variance, by source; needs two seeds."""
        sources = self._sources(len(self.logs))
        total = _sum(sources).value
        return {name: source.value / total for name, source in sources.items()}

    def is_within(self, low: float, high: float) -> bool | None:
        """Whether the ratio is: all of the interval must be inside, or all outside. None: undecided, or too few seeds.

        This is the verdict on every ratio.
        """
        if len(self.logs) < SEEDS:
            return None
        least, most = self.ends
        if low <= least and most <= high:
            return True
        return False if most < low or least > high else None

    def power(self, low: float, high: float, seeds: int) -> float:
        """The probability of a verdict with so many seeds, either way.

        It assumes that the true mean and variances are those that were seen, though few seeds hardly tell them, that
        errors are normal, and that each variance is estimated anew as a χ² (so that the end of the limits minus the
        mean, over its error, is a noncentral t where there is one source). A mean over quantiles of each χ² is taken.
        """
        sources = self._sources(seeds)
        error, (least, most) = math.sqrt(_sum(sources).value), (_log(x) - np.mean(self.logs) for x in (low, high))
        drawn = np.meshgrid(*(x.value * _chi_square(x.freedom) for x in sources.values()))
        pairs = zip(sources.items(), drawn, strict=True)
        halves = _half({name: Variance(values, source.freedom) for (name, source), values in pairs})
        inside = np.maximum(ndtr((most - halves) / error) - ndtr((least + halves) / error), 0)
        outside = ndtr((least - halves) / error) + ndtr((-most - halves) / error)
        return float(np.mean(inside + outside))

    def text(self, of: str) -> str:
        """The ratios over those `of` another model, with the interval, in words."""
        ratios = f"{spread(self.ratios)} {of}"
        if len(self.logs) < 2:
            return ratios
        known = "95 %: {:.3f} to {:.3f}".format(*self.ends)
        if self.shared:
            shares = (f"{100 * share:.0f} % {name}" for name, share in self.shares.items())
            known += f"; of the variance {', '.join(shares)}"
        return f"{ratios} ({known})"

    def _sources(self, seeds: int) -> dict[str, Variance]:
        """The variances of the mean over so many seeds."""
        of_one = float(np.var(self.logs, ddof=1))
        return {"seeds": Variance(of_one / seeds, seeds - 1), **self.shared}


def _sum(sources: Mapping[str, Variance]) -> Variance:
    parts = [np.maximum(source.value, _ROUNDING) for source in sources.values()]
    squares = [part**2 / source.freedom for part, source in zip(parts, sources.values(), strict=True)]
    return Variance(sum(parts), sum(parts) ** 2 / sum(squares))


def _half(sources: Mapping[str, Variance]) -> np.ndarray:
    """Of the 95 % interval: that of the sum, or of one source if that is wider."""
    widths = [stdtrit(x.freedom, 0.975) * np.sqrt(x.value) for x in (_sum(sources), *sources.values())]
    return np.max(widths, axis=0)


def _chi_square(freedom: float) -> np.ndarray:
    """Quantiles of a χ² over its degrees of freedom, as far apart."""
    return 2 * gammaincinv(freedom / 2, (np.arange(_QUANTILES) + 0.5) / _QUANTILES) / freedom


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def spread(ratios: Sequence[float]) -> str:
    """The geometric mean of ratios of each seed, with the smallest and largest."""
    middle = statistics.geometric_mean(ratios)
    if len(ratios) == 1:
        return f"{middle:.3f} (one seed) ×"
    return f"{middle:.3f} ({min(ratios):.3f}–{max(ratios):.3f}, {len(ratios)} seeds) ×"


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
        raise NoFigureError(f"{time:.5g} is not within the {min(times):.5g} to {max(times):.5g} of the curve")
    weight = lambda at: math.prod(math.log(time / other) / math.log(at / other) for other in times if other != at)
    return np.sum([weight(at) * loss for at, loss in curve], axis=0)
