"""Classification scores from a confusion matrix, each with its 95 % interval."""

import functools
import math
from collections.abc import Iterator

import numpy as np

_NORMAL_95 = 1.959964  # standard deviations of a normal distribution that hold 95 % of it
_RESAMPLES, _SEED = 1000, 0


def confusion_scores(counts_CxC: np.ndarray) -> dict[str, float]:
    """Accuracy, macro-averaged F1 and Matthews' correlation, each with NAME_low and NAME_high, its 95 % interval.

    >>> scores = confusion_scores(np.array([[8, 2], [1, 9]]))
    >>> scores["accuracy"], scores["majority"]
    (0.85, 0.5)

    Args:
        counts_CxC: confusion matrix: number of examples with this label (first axis) and this prediction (second).

    Returns:
        The scores; and `majority`, the share of the most frequent label, which is the accuracy of always predicting it.
        The interval of accuracy is Wilson's; those of macro_f1 and matthews are percentiles over resampled examples
        (the bootstrap, Efron 1979), always with the same random numbers.
    """
    # Accuracy and the majority baseline.
    counts_CxC = np.asarray(counts_CxC, np.float64)
    hits, count = float(np.trace(counts_CxC)), float(counts_CxC.sum())
    low, high = wilson(hits, count)
    scores = {"accuracy": hits / count if count else math.nan, "accuracy_low": low, "accuracy_high": high}
    scores["majority"] = float(counts_CxC.sum(axis=1).max() / count) if count else math.nan

    # Scores without a closed-form interval: the bootstrap.
    score_functions = {
        "macro_f1": functools.partial(macro_f1, labels_C=_label_totals(counts_CxC) > 0),
        "matthews": matthews,
    }
    resampled = [
        [score(resampled_CxC) for score in score_functions.values()] for resampled_CxC in _resample(counts_CxC)
    ]
    bounds = (
        np.quantile(resampled, (0.025, 0.975), axis=0) if resampled else np.full((2, len(score_functions)), math.nan)
    )
    for (name, score), low, high in zip(score_functions.items(), *bounds, strict=True):
        scores |= {name: score(counts_CxC), f"{name}_low": float(low), f"{name}_high": float(high)}
    return scores


def macro_f1(counts_CxC: np.ndarray, labels_C: np.ndarray | None = None) -> float:
    """Mean over the labels of F1 = 2 hits / (examples with the label + predictions of it).

    Args:
        counts_CxC: confusion matrix, see `confusion_scores`.
        labels_C: the labels to average over; one without examples and predictions counts as 0. None: all labels that
            have either. Resampled examples may miss a rare label; if it then left the mean, the interval would be far
            too high.
    """
    total_C = _label_totals(counts_CxC)
    chosen_C = total_C > 0 if labels_C is None else labels_C
    f1_C = 2 * np.diag(counts_CxC) / np.maximum(total_C, 1)
    return float(f1_C[chosen_C].mean()) if chosen_C.any() else math.nan


def matthews(counts_CxC: np.ndarray) -> float:
    """Matthews' correlation of labels and predictions, for any number of labels (Gorodkin 2004, eq. 8).

    Between −1 and 1 for two labels; 0 if all examples have the same label, or the same prediction.

    Args:
        counts_CxC: confusion matrix, see `confusion_scores`.
    """
    of_label_C, of_prediction_C, count = counts_CxC.sum(axis=1), counts_CxC.sum(axis=0), counts_CxC.sum()
    covariance = np.trace(counts_CxC) * count - of_label_C @ of_prediction_C
    spread = (count**2 - of_label_C @ of_label_C) * (count**2 - of_prediction_C @ of_prediction_C)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def wilson(hits: float, count: float) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927); (0, 1) if count is 0.

    >>> [round(end, 3) for end in wilson(85, 100)]
    [0.767, 0.907]
    """
    if not count:
        return 0.0, 1.0
    share, z2 = hits / count, _NORMAL_95**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = _NORMAL_95 / (1 + z2) * math.sqrt(share * (1 - share) / count + z2 / (4 * count))
    # Mathematically the share is always inside; this also holds after rounding.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def _label_totals(counts_CxC: np.ndarray) -> np.ndarray:
    """Number of examples with each label plus predictions of it, C."""
    return counts_CxC.sum(axis=0) + counts_CxC.sum(axis=1)


def _resample(counts_CxC: np.ndarray) -> Iterator[np.ndarray]:
    """Yields confusion matrices of the same number of examples, drawn with replacement."""
    rows = round(counts_CxC.sum())
    if not rows:
        return
    rng = np.random.default_rng(_SEED)
    cells = counts_CxC.nonzero()
    for counts in rng.multinomial(rows, counts_CxC[cells] / counts_CxC.sum(), size=_RESAMPLES):
        resampled_CxC = np.zeros_like(counts_CxC)
        resampled_CxC[cells] = counts
        yield resampled_CxC
