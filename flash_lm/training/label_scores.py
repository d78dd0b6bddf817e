"""Scores of predicted labels, from counts of (label, prediction), each with its 95 % interval."""

import functools
import math
from collections.abc import Iterator

import numpy as np

_NORMAL_95 = 1.959964  # standard deviations of a normal distribution that hold 95 % of it
_RESAMPLES, _SEED = 1000, 0


def scores_of_confusion(counts_CxC: np.ndarray) -> dict[str, float]:
    """Accuracy, macro-averaged F1 and Matthews' correlation, each with NAME_low and NAME_high, its 95 % interval.

    Args:
        counts_CxC: rows with this label (first axis) and this prediction (second).

    Returns:
        Also `majority`: the share of the most frequent label, which is the accuracy of the best answer that is always
        the same. The interval of accuracy is Wilson's; those of macro_f1 and matthews are percentiles over resampled
        rows (the bootstrap, Efron 1979), always with the same random numbers.
    """
    counts_CxC = np.asarray(counts_CxC, np.float64)
    hits, count = float(np.trace(counts_CxC)), float(counts_CxC.sum())
    low, high = wilson(hits, count)
    scores = {"accuracy": hits / count if count else math.nan, "accuracy_low": low, "accuracy_high": high}
    scores["majority"] = float(counts_CxC.sum(axis=1).max() / count) if count else math.nan
    kinds = {"macro_f1": functools.partial(macro_f1, of_C=_either(counts_CxC) > 0), "matthews": matthews}
    drawn = [[score(again_CxC) for score in kinds.values()] for again_CxC in _resampled(counts_CxC)]
    ends = np.quantile(drawn, (0.025, 0.975), axis=0) if drawn else np.full((2, len(kinds)), math.nan)
    for (name, score), low, high in zip(kinds.items(), *ends, strict=True):
        scores |= {name: score(counts_CxC), f"{name}_low": float(low), f"{name}_high": float(high)}
    return scores


def macro_f1(counts_CxC: np.ndarray, of_C: np.ndarray | None = None) -> float:
    """The mean of F1 = 2 hits / (rows with the label + predictions of it), over labels that have either.

    Args:
        counts_CxC: as in `scores_of_confusion`.
        of_C: the labels of the mean instead, of which one that has neither counts as 0. Rows that are drawn again may
            miss a rare label; if it then left the mean, the interval would reach far too high.
    """
    either_C = _either(counts_CxC)
    chosen_C = either_C > 0 if of_C is None else of_C
    f1_C = 2 * np.diag(counts_CxC) / np.maximum(either_C, 1)
    return float(f1_C[chosen_C].mean()) if chosen_C.any() else math.nan


def matthews(counts_CxC: np.ndarray) -> float:
    """Matthews' correlation of labels and predictions, for any number of labels (Gorodkin 2004, eq. 8).

    0 if there is one label only, or one prediction only; it is between −1 and 1 for two labels.

    Args:
        counts_CxC: as in `scores_of_confusion`.
    """
    of_label_C, of_prediction_C, count = counts_CxC.sum(axis=1), counts_CxC.sum(axis=0), counts_CxC.sum()
    covariance = np.trace(counts_CxC) * count - of_label_C @ of_prediction_C
    spread = (count**2 - of_label_C @ of_label_C) * (count**2 - of_prediction_C @ of_prediction_C)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def wilson(hits: float, count: float) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927); (0, 1) if count is 0."""
    if not count:
        return 0.0, 1.0
    share, z2 = hits / count, _NORMAL_95**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = _NORMAL_95 / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    # The share itself is always inside, but for rounding.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _either(counts_CxC: np.ndarray) -> np.ndarray:
    """Rows with each label and predictions of it, together."""
    return counts_CxC.sum(axis=0) + counts_CxC.sum(axis=1)


def _resampled(counts_CxC: np.ndarray) -> Iterator[np.ndarray]:
    """Counts of as many rows, drawn again with replacement."""
    rows = round(counts_CxC.sum())
    if not rows:
        return
    draw = np.random.default_rng(_SEED)
    places = counts_CxC.nonzero()
    for drawn in draw.multinomial(rows, counts_CxC[places] / counts_CxC.sum(), size=_RESAMPLES):
        found_CxC = np.zeros_like(counts_CxC)
        found_CxC[places] = drawn
        yield found_CxC
