"""Fits how a loss falls with parameters and tokens ("Training Compute-Optimal Large Language Models", approach 3).

    L(N, D) = E + A / N^α + B / D^β

Hoffmann et al. 2022, arXiv:2203.15556, section 3.3: the sum over runs of a Huber loss of log L, by L-BFGS from a grid
of starting points. It is the sum and not the mean, whose gradients would end the search too early (Besiroglu et al.
2024, arXiv:2404.10102, section 4).
"""

import dataclasses
import itertools
import math

import numpy as np
import scipy.optimize

_HUBER = 1e-3
# Shares of the loss that is E at first, α and β; A and B share the rest in the middle of the runs.
_STARTS = tuple(itertools.product((0.3, 0.7), (0.2, 0.5), (0.2, 0.5)))
_FEWEST = 6  # runs: one more than there are unknowns
_INTERVAL = (2.5, 97.5)


@dataclasses.dataclass(frozen=True)
class Law:
    """The constants of the law, in the units of N, D and L.

    >>> law = Law(E=2.0, A=10.0, B=10.0, alpha=0.5, beta=0.5)
    >>> float(law(100.0, 400.0)), law.exponent
    (3.5, 0.5)
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __call__(self, parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the loss, E + A / N^α + B / D^β."""
        return self.E + self.A / np.asarray(parameters) ** self.alpha + self.B / np.asarray(tokens) ** self.beta

    @property
    def exponent(self) -> float:
        """The exponent a of the best number of parameters for a budget C: N ∝ C^a, a = β / (α + β), if C ∝ N D."""
        return self.beta / (self.alpha + self.beta)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law, and the 95 % interval of each constant and of the exponent over resampled runs, by name."""

    law: Law
    intervals: dict[str, tuple[float, float]]


def fit(parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray, seed: int = 0, samples: int = 200) -> Fit:
    """Fits the law to runs.

    Args:
        parameters: N of each run.
        tokens: D of each run.
        losses: L of each run, positive.
        seed: seed of the resampling.
        samples: number of resamplings of the runs, with replacement, for the intervals.

    Raises:
        ValueError: fewer than six runs, or all of one size or of one number of tokens.
    """
    runs = np.log(np.stack([parameters, tokens, losses]).astype(np.float64))
    if runs.shape[1] < _FEWEST or any(len(set(row)) < 2 for row in runs[:2]):
        raise ValueError(f"needs {_FEWEST} runs or more, of several sizes and several numbers of tokens")
    # Centred, where the constants depend least on each other: the search is then a hundred times shorter.
    middle = runs.mean(axis=1, keepdims=True) * np.array([[1.0], [1.0], [0.0]])
    centred = runs - middle
    typical = float(runs[2].mean())

    def start(share: float, alpha: float, beta: float) -> np.ndarray:
        rest = np.log((1 - share) / 2) + typical
        return np.array([rest, rest, np.log(share) + typical, alpha, beta])

    best = min((_minimize(centred, start(*chosen)) for chosen in _STARTS), key=lambda result: result.fun)
    draw = np.random.default_rng(seed)
    laws = []
    for _ in range(samples):
        chosen = draw.integers(runs.shape[1], size=runs.shape[1])
        laws.append(_law(_minimize(centred[:, chosen], best.x).x, middle))
    names = [*(field.name for field in dataclasses.fields(Law)), "exponent"]
    ends = {name: np.percentile([getattr(law, name) for law in laws], _INTERVAL) for name in names}
    return Fit(_law(best.x, middle), {name: (float(low), float(high)) for name, (low, high) in ends.items()})


def _law(x: np.ndarray, middle: np.ndarray) -> Law:
    a, b, e, alpha, beta = map(float, x)
    log_n, log_d = float(middle[0, 0]), float(middle[1, 0])
    return Law(math.exp(e), math.exp(a + alpha * log_n), math.exp(b + beta * log_d), alpha, beta)


def _minimize(runs: np.ndarray, start: np.ndarray) -> scipy.optimize.OptimizeResult:
    """Minimizes the Huber loss from (log A, log B, log E, α, β); `runs`: log N, log D and log L, N and D centred."""

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        a, b, e, alpha, beta = x
        log_n, log_d, log_loss = runs
        terms = np.stack([a - alpha * log_n, b - beta * log_d, np.full_like(log_n, e)])
        top = terms.max(axis=0)
        weights = np.exp(terms - top)
        predicted = np.log(weights.sum(axis=0)) + top
        weights /= weights.sum(axis=0)
        off = predicted - log_loss
        slope = np.clip(off, -_HUBER, _HUBER)
        value = np.where(np.abs(off) <= _HUBER, off**2 / 2, _HUBER * (np.abs(off) - _HUBER / 2)).sum()
        gradient = np.array(
            [
                (slope * weights[0]).sum(),
                (slope * weights[1]).sum(),
                (slope * weights[2]).sum(),
                -(slope * weights[0] * log_n).sum(),
                -(slope * weights[1] * log_d).sum(),
            ]
        )
        # The terms are of the size of Huber's δ², below the tolerances of the search.
        return value / _HUBER**2, gradient / _HUBER**2

    return scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 500})
