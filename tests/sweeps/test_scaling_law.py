"""The law is recovered from runs that follow it, with noise and without."""

import numpy as np
import pytest

from flash_lm.sweeps.scaling_law import Law, fit

# Of the size of Hoffmann et al.'s, at the sizes of two cores.
TRUE = Law(E=1.8, A=480.0, B=2100.0, alpha=0.35, beta=0.37)


def runs(noise: float, seed: int = 0):
    sizes, ratios = np.geomspace(2e5, 2e7, 6), np.geomspace(3, 100, 6)
    n, d = (x.ravel() for x in np.meshgrid(sizes, ratios))
    d = n * d
    draw = np.random.default_rng(seed)
    return n, d, TRUE(n, d) * np.exp(noise * draw.normal(size=n.size))


def test_exact_runs_give_the_exact_law():
    law = fit(*runs(0.0), samples=1).law
    for name in ("E", "A", "B", "alpha", "beta"):
        assert np.isclose(getattr(law, name), getattr(TRUE, name), rtol=0.02), name
    assert np.isclose(law.exponent, 0.37 / 0.72, atol=1e-3)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow("another seed")),
        pytest.param(2, marks=pytest.mark.slow("another seed")),
    ],
)
def test_noisy_runs_have_the_law_within_their_intervals(seed):
    """A loss of ±0.3 %: the fitted exponent is within 0.05 of the true one, and the intervals contain the truth."""
    fitted = fit(*runs(0.003, seed), samples=50)
    assert abs(fitted.law.exponent - TRUE.exponent) < 0.05
    inside = [low <= getattr(TRUE, name) <= high for name, (low, high) in fitted.intervals.items()]
    assert sum(inside) >= 5, fitted
    low, high = fitted.intervals["exponent"]
    assert 0 < high - low < 0.2


def test_one_wrong_run_changes_little():
    """The Huber loss: a run that failed, at twice the loss, moves the exponent by less than 0.05."""
    n, d, losses = runs(0.003)
    losses[7] *= 2
    assert abs(fit(n, d, losses, samples=1).law.exponent - TRUE.exponent) < 0.05


@pytest.mark.parametrize("few", [slice(5), slice(0, 36, 6)])
def test_too_few_runs_are_refused(few):
    n, d, losses = (x[few] for x in runs(0.0))
    if len(n) == 6:
        n = np.full_like(n, 1e6)
    with pytest.raises(ValueError, match="needs 6 runs or more"):
        fit(n, d, losses)
