"""What the curves of a study of trunks say between their budgets, and at other times of a step."""

import math
from collections.abc import Sequence

import numpy as np

from flash_lm.runs.jsonl import Line
from studies.protocol.ratios import loss_at

Curve = list[tuple[float, np.ndarray]]  # steps and the loss on the test split, of runs that were annealed


def curves_of(lines: Sequence[Line], part: str, model: str) -> dict[int, Curve]:
    """The curve of each seed of a model, in rows as long as those of its training.

    Args:
        lines: of runs, see `trunk_job`.
        part: of the study.
        model: of that part.
    """
    found: dict[int, Curve] = {}
    scored = [line for line in lines if (line["part"], line["run"], line.get("split")) == (part, model, "test")]
    for line in sorted(scored, key=lambda line: line["step"]):
        if line["length"] == line["trained_length"] and "slice" not in line:
            found.setdefault(line["seed"], []).append((line["step"], np.array(line["loss"])))
    return found


def perplexity_after(curve: Curve, steps: float) -> float:
    """That of a run that would have been annealed after so many steps; raises NoFigureError beyond the curve."""
    return math.exp(loss_at(curve, steps))


def ratio_at_equal_time(one: Curve, other: Curve, slower: float) -> float:
    """The first one's perplexity over the other's, at the training time of the one that needs less.

    Args:
        one: a curve.
        other: another one.
        slower: the time of a step of the first over that of the other.

    Raises:
        NoFigureError: that time is not within both curves.
    """
    against_time = [(steps * slower, loss) for steps, loss in one]
    end = min(against_time[-1][0], other[-1][0])
    return math.exp(loss_at(against_time, end) - loss_at(other, end))
