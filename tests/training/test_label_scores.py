"""Scores of labels against scikit-learn, and their intervals against a bootstrap one row at a time."""

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score, matthews_corrcoef

from flash_lm.training.label_scores import confusion_scores, macro_f1, matthews, wilson

REFERENCES = {
    "macro_f1": lambda labels, predicted, of=None: f1_score(
        labels, predicted, labels=of, average="macro", zero_division=0
    ),
    "matthews": matthews_corrcoef,
}


def rows(count, classes, right, seed):
    """Labels, the later ones rarer, and predictions."""
    draw = np.random.default_rng(seed)
    shares = 1 / np.arange(1, classes + 1)
    labels = draw.choice(classes, count, p=shares / shares.sum())
    return labels, np.where(draw.random(count) < right, labels, draw.integers(classes, size=count))


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.95])
def test_scores_equal_those_of_scikit_learn(classes, right):
    labels, predicted = rows(40, classes, right, classes)
    counts = confusion_matrix(labels, predicted, labels=range(classes + 2))  # two labels that no row has
    assert macro_f1(counts) == pytest.approx(REFERENCES["macro_f1"](labels, predicted), abs=1e-12)
    assert matthews(counts) == pytest.approx(REFERENCES["matthews"](labels, predicted), abs=1e-12)


def test_an_interval_has_its_coverage():
    for count in range(1, 60):
        for hits in range(count + 1):
            low, high = wilson(hits, count)
            assert 0 <= low <= hits / count <= high <= 1


def test_constant_predictions():
    counts = np.array([[30, 0], [10, 0]])
    assert matthews(counts) == 0 and matthews(counts.T) == 0
    assert macro_f1(counts) == pytest.approx((2 * 30 / 70) / 2)
    nothing = confusion_scores(np.zeros((2, 2)))
    assert (nothing["accuracy_low"], nothing["accuracy_high"]) == (0, 1)
    assert np.isnan(nothing["accuracy"]) and np.isnan(nothing["macro_f1"]) and nothing["matthews"] == 0


@pytest.mark.parametrize("name", REFERENCES)
def test_intervals_equal_those_of_a_bootstrap(name):
    labels, predicted = rows(200, 3, 0.6, 0)
    scores = confusion_scores(confusion_matrix(labels, predicted))
    draw, drawn = np.random.default_rng(1), []
    for _ in range(1000):
        again = draw.integers(200, size=200)
        drawn.append(REFERENCES[name](labels[again], predicted[again]))
    low, high = np.quantile(drawn, (0.025, 0.975))
    assert (scores[f"{name}_low"], scores[f"{name}_high"]) == pytest.approx((low, high), abs=0.015)
    assert high - low > 0.1
    assert (scores["accuracy_low"], scores["accuracy_high"]) == wilson((labels == predicted).sum(), 200)


def test_resamples_without_a_rare_label_do_not_raise_the_interval():
    """Two of 100 rows have the second label, and no prediction does: its F1 is 0 at best in any resample."""
    labels, predicted = np.repeat([0, 1], (98, 2)), np.zeros(100, int)
    scores = confusion_scores(confusion_matrix(labels, predicted))
    draw, drawn = np.random.default_rng(1), []
    for _ in range(1000):
        again = draw.integers(100, size=100)
        drawn.append(REFERENCES["macro_f1"](labels[again], predicted[again], of=[0, 1]))
    ends = np.quantile(drawn, (0.025, 0.975))
    assert (scores["macro_f1_low"], scores["macro_f1_high"]) == pytest.approx(tuple(ends), abs=0.005)
    assert scores["macro_f1_low"] < scores["macro_f1"] <= scores["macro_f1_high"] <= 0.5
