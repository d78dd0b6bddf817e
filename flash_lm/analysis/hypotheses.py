"""Verdicts on the hypotheses of a study of trunks, by rules that are set before its runs.

A hypothesis says how one model's perplexity stands to another's. It is judged seed by seed, and only seeds that all
agree decide, each by more than the error of the text that was scored.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flash_lm.analysis.relations import ALIKE, RELATIONS, bounds, spread
from flash_lm.analysis.table import Columns, markdown_table
from flash_lm.analysis.verdicts import NOT_RUN
from flash_lm.jsonl import Line
from flash_lm.trunk_study import step_name

SEEDS = 3  # that a verdict needs
_FEWEST_BLOCKS = 20  # from which an error is known
NORMAL_95 = 1.959964  # standard deviations of a normal distribution that hold 95 % of it
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
_COLUMNS: Columns = {
    "": ("number", "{}"),
    "hypothesis": ("hypothesis", "{}"),
    "verdict": ("verdict", "{}"),
    "figure": ("figure", "{}"),
}


def decided_by_seeds(held: Sequence[bool | None], lost: bool) -> str:
    """The verdict: it needs seeds enough, all of which agree.

    Args:
        held: whether the hypothesis held, with each seed that has a figure; None: too near to tell.
        lost: whether another seed was run that has none.
    """
    if not held and not lost:
        return NOT_RUN
    if lost or len(held) < SEEDS or len(set(held)) > 1 or None in held:
        return UNDECIDED
    return HOLDS if held[0] else FAILS


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """That the perplexity of one model is "better" than, "no worse" than, or "alike" that of another.

    Attributes:
        number: in the design of the study; a number may have several hypotheses.
        part: of the study.
        first: the model.
        relation: a key of `RELATIONS`.
        second: the other model.
        slice: of the targets; None: all of them.
        at_equal_time: not at the whole budget of both, but at the training time of the one that needs less.
    """

    number: int
    part: str
    first: str
    relation: str
    second: str
    slice: str | None = None
    at_equal_time: bool = False

    @property
    def text(self) -> str:
        """In words, with its threshold."""
        of = f" on the slice {self.slice}" if self.slice else ""
        at = "time" if self.at_equal_time else "tokens"
        limits = bounds(*RELATIONS[self.relation](ALIKE))
        return f"{self.part}: {self.first}{of} {limits} {self.second}, at equal {at}"

    def judge(self, lines: Sequence[Line], times: Sequence[Line]) -> Line:
        """The verdict.

        Args:
            lines: of `run_trunks`.
            times: lines whose `run` is `step_name`, with microbatch_ms and iqr_ms.

        Returns:
            A line with number, hypothesis, verdict, figure, and, as far as there are any, `ratios` by seed and their
            `errors`: half of the 95 % interval, as a share. At equal time an error is the farthest end of that interval
            when half of its interquartile range is taken from the time of one model's step, and added to the other's.
        """
        steps = {line["run"]: line for line in times}
        found: dict[int, _Ratio] = {}
        reasons = []
        for seed, one, other in self._pairs(lines):
            try:
                found[seed] = self._ratio(one, other, steps)
            except _NoFigureError as error:
                reasons.append(str(error))
        low, high = RELATIONS[self.relation](ALIKE)
        held = [ratio.is_within(low, high) for ratio in found.values()]
        error = max((ratio.error for ratio in found.values()), default=0.0)
        figure = [f"{spread([x.value for x in found.values()])} {self.second} (± {100 * error:.1f} %)"] if found else []
        return {
            "number": self.number,
            "hypothesis": self.text,
            "verdict": decided_by_seeds(held, lost=bool(reasons)),
            "figure": "; ".join([*figure, *dict.fromkeys(reasons)]),
            "ratios": {str(seed): ratio.value for seed, ratio in found.items()},
            "errors": {str(seed): ratio.error for seed, ratio in found.items()},
        }

    def _pairs(self, lines: Sequence[Line]) -> Iterator[tuple[int, list[Line], list[Line]]]:
        """Each seed that both models have, with the scores of each, by growing budget."""
        of: dict[str, dict[int, list[Line]]] = {self.first: {}, self.second: {}}
        for line in sorted(lines, key=lambda line: line.get("share", 0)):
            if line["part"] == self.part and line["run"] in of and self._is_ours(line):
                of[line["run"]].setdefault(line["seed"], []).append(line)
        one, other = of.values()
        yield from ((seed, one[seed], other[seed]) for seed in sorted(one.keys() & other))

    def _is_ours(self, line: Line) -> bool:
        if "failed" in line:
            return True
        at = line["split"], line["length"], line.get("slice")
        return at == ("test", line["trained_length"], self.slice)

    def _ratio(self, one: list[Line], other: list[Line], steps: Mapping[str, Line]) -> "_Ratio":
        for line in (*one, *other):
            if "failed" in line:
                raise _NoFigureError(f"{line['run']} failed with seed {line['seed']}")
        if len({(x["corpus_hash"], x["split"], *x["tokens_blocks"]) for x in (*one, *other)}) > 1:
            raise _NoFigureError("not scored on the same targets")
        tokens_N = np.array(one[-1]["tokens_blocks"])
        if not self.at_equal_time:
            return _ratio_of(_nll(one[-1]), _nll(other[-1]), tokens_N)
        at, *ends = (_at_equal_time(one, other, steps, halves) for halves in ((0, 0), (-1, 1), (1, -1)))
        return at._replace(error=max(abs(math.log(x.value / at.value)) + x.error for x in (at, *ends)))


class _Ratio(NamedTuple):
    """Of two perplexities on the same blocks of a text."""

    value: float
    error: float  # half of the 95 % interval, as a share

    def is_within(self, low: float, high: float) -> bool | None:
        """Whether it is; None: its interval has one of the ends."""
        ends = self.value * math.exp(-self.error), self.value * math.exp(self.error)
        if any(ends[0] <= end <= ends[1] for end in (low, high)):
            return None
        return low < self.value < high


def _ratio_of(one_N: np.ndarray, other_N: np.ndarray, tokens_N: np.ndarray) -> _Ratio:
    """Of the negative log-likelihoods of two models on N blocks of text, on which both were scored.

    The error is that of a ratio of sums of independent blocks (Cochran 1977, "Sampling Techniques", section 6.4). It is
    an approximation: neighbours may be parts of one document.
    """
    if len(tokens_N) < _FEWEST_BLOCKS:
        raise _NoFigureError(f"scored in {len(tokens_N)} blocks of text, too few to know its error")
    differences_N, count, total = one_N - other_N, len(tokens_N), tokens_N.sum()
    mean = differences_N.sum() / total
    square = count / (count - 1) * np.square(differences_N - mean * tokens_N).sum()
    return _Ratio(math.exp(mean), NORMAL_95 * math.sqrt(square) / total)


def loss_at(curve: Sequence[tuple[float, np.ndarray]], time: float) -> np.ndarray:
    """The loss at a time, on the straight line between the two nearest points of a curve over the logarithm of time.

    Args:
        curve: times and losses (of any shape, such as one of each block) of runs that were annealed, by growing time.
        time: within those of the curve.

    Raises:
        ValueError: the time is not within those of the curve.
    """
    i = bisect.bisect_left(curve, time, key=lambda point: point[0])
    if i < len(curve) and curve[i][0] == time:
        return curve[i][1]
    if not 0 < i < len(curve):
        raise _NoFigureError(f"{time:.3g} is not within the {curve[0][0]:.3g} to {curve[-1][0]:.3g} of the curve")
    (before, high), (after, low) = curve[i - 1], curve[i]
    weight = math.log(time / before) / math.log(after / before)
    return (1 - weight) * high + weight * low


def verdict_table(found: Sequence[Line], figures: str = "Ratios of perplexities") -> str:
    """Markdown.

    Args:
        found: lines with number, hypothesis, verdict and figure, such as those of `Hypothesis.judge`.
        figures: what the figures are.
    """
    needs = f"{figures}, seed by seed; a verdict needs {SEEDS} seeds that agree, each beyond its error."
    return f"{needs}\n\n{markdown_table(found, _COLUMNS)}"


class _NoFigureError(ValueError):
    """Why a seed has no ratio."""


def _nll(line: Line) -> np.ndarray:
    return np.array(line["nll_blocks"])


def _at_equal_time(one: list[Line], other: list[Line], steps: Mapping[str, Line], halves: tuple[int, int]) -> _Ratio:
    """At the end of the one that needs less; so many halves of the interquartile range are added to a step's time."""
    curves = [_against_time(lines, steps, half) for lines, half in zip((one, other), halves, strict=True)]
    end = min(curve[-1][0] for curve in curves)
    first_N, second_N = (loss_at(curve, end) for curve in curves)
    return _ratio_of(first_N, second_N, np.array(one[-1]["tokens_blocks"]))


def _against_time(lines: Sequence[Line], steps: Mapping[str, Line], half: int) -> list[tuple[float, np.ndarray]]:
    """Minutes of training and losses of each budget."""
    name = step_name(lines[0]["part"], lines[0]["run"])
    if name not in steps:
        raise _NoFigureError(f"the step of {lines[0]['run']} was not timed")
    step_ms = steps[name]["microbatch_ms"] + half * steps[name]["iqr_ms"] / 2
    return [(line["step"] * step_ms / 60_000, _nll(line)) for line in lines]
