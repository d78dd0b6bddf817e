"""Loss curves of a study of trunks, interpolated between its budgets and at other step times."""

import math
from collections.abc import Sequence

import numpy as np

from flash_lm.report.ratios import loss_at
from flash_lm.runs.jsonl import Line

Curve = list[tuple[float, np.ndarray]]  # steps and the loss on the test split, of runs that were annealed


def seed_curves(lines: Sequence[Line], part: str, model: str) -> dict[int, Curve]:
    """Returns the curve of each seed of a model, scored at the sequence length of its training.

    Args:
        lines: lines of runs, see `trunk_job`.
        part: part of the study.
        model: name of a model of that part.
    """
    curves: dict[int, Curve] = {}
    scored = [line for line in lines if (line["part"], line["run"], line.get("split")) == (part, model, "test")]
    for line in sorted(scored, key=lambda line: line["step"]):
        if line["length"] == line["trained_length"] and "slice" not in line:
            curves.setdefault(line["seed"], []).append((line["step"], np.array(line["loss"])))
    return curves


def perplexity_after(curve: Curve, steps: float) -> float:
    """Returns the perplexity of a run annealed after this number of steps; raises NoFigureError outside the curve."""
    return math.exp(loss_at(curve, steps))


def ratio_at_equal_time(one: Curve, other: Curve, slower: float) -> float:
    """Returns the first model's perplexity over the other's, at the training time of the quicker one.

    Args:
        one: curve of the first model.
        other: curve of the other model.
        slower: step time of the first over step time of the other.

    Raises:
        NoFigureError: that time is not within both curves.
    """
    against_time = [(steps * slower, loss) for steps, loss in one]
    end = min(against_time[-1][0], other[-1][0])
    return math.exp(loss_at(against_time, end) - loss_at(other, end))
