"""Rules on the runs of a study of recall, seed by seed, each model at its best rate on the validation split."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from scipy.stats import spearmanr

from flash_lm.runs.jsonl import Line
from studies.claims.evidence import Evidence, MissingError
from studies.protocol.rates import lines_at_best_rate
from studies.protocol.verdict import FEWEST, UNDECIDED, Verdict, judge_seeds
from studies.recall.report import loss_of


@dataclasses.dataclass(frozen=True)
class RecallGrows:
    """Models with larger states recall more: the rank correlation of state bytes and accuracy.

    Attributes:
        files: the one file of runs.
        width: of the models.
        models: with states of several sizes.
        least: smallest accepted value.
        rates: that each model must have been trained at; default: all of the file.
    """

    files: Sequence[str]
    width: int
    models: Sequence[str]
    least: float
    rates: Sequence[float] = ()

    @property
    def text(self) -> str:
        """With the bound."""
        return f"rank correlation of bytes of state and accuracy, width {self.width}, at least {self.least:g}"

    def judge(self, evidence: Evidence) -> Verdict:
        """Uses the seeds that all models have."""
        runs, reasons = _by_seed(evidence, self, self.models)
        found = []
        for seed in _common(runs):
            lines = [seeds[seed] for seeds in runs]
            found.append(rank_correlation([x["state_bytes"] for x in lines], [x["accuracy"] for x in lines]))
        figure = f"rank correlation at width {self.width} {', '.join(f'{x:.2f}' for x in found)}"
        return Verdict(
            UNDECIDED if reasons else judge_seeds([x >= self.least for x in found], seeds=FEWEST), figure, reasons
        )


@dataclasses.dataclass(frozen=True)
class Recalls:
    """The accuracy of a model, or its difference to another's.

    Attributes:
        files: the one file of runs.
        width: of the models.
        first: a model.
        second: another one, whose accuracy is subtracted; None: nothing is.
        part: of the test split; None: all of it.
        least: smallest accepted value.
        most: largest accepted value.
        rates: that each model must have been trained at; default: all of the file.
    """

    files: Sequence[str]
    width: int
    first: str
    least: float = -1.0
    most: float = 1.0
    second: str | None = None
    part: str | None = None
    rates: Sequence[float] = ()

    @property
    def text(self) -> str:
        """With the bounds."""
        bounds = {"at least": self.least, "at most": self.most}
        said = " and ".join(f"{name} {_points(x, self.second)}" for name, x in bounds.items() if abs(x) < 1)
        return f"{self._what}, width {self.width}, {said}"

    def judge(self, evidence: Evidence) -> Verdict:
        """Uses the seeds that both models have."""
        names = [self.first, *([self.second] if self.second else [])]
        runs, reasons = _by_seed(evidence, self, names)
        found = []
        for seed in _common(runs):
            value, *other = (self._accuracy(seeds[seed]) for seeds in runs)
            found.append(value - sum(other))
        listed = ", ".join(_points(x, self.second) for x in found)
        word = UNDECIDED if reasons else judge_seeds([self.least <= x <= self.most for x in found], seeds=FEWEST)
        return Verdict(word, f"{self._what} at width {self.width} {listed}", reasons)

    def _accuracy(self, line: Line) -> float:
        return line["accuracy"] if self.part is None else line["by_part"][self.part]

    @property
    def _what(self) -> str:
        minus = f" minus that of {self.second}" if self.second else ""
        return f"accuracy of {self.first}{minus}{f' in {self.part}' if self.part else ''}"


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; 0 if all values of one are equal, for which it is not defined."""
    if 1 in (len({*one}), len({*other})):
        return 0.0
    found: Any = spearmanr(one, other)
    return float(found.statistic)


def _by_seed(
    evidence: Evidence, rule: RecallGrows | Recalls, models: Sequence[str]
) -> tuple[list[dict[int, Line]], tuple[str, ...]]:
    """Each model's runs at its best rate by seed, and the reasons, if any, why they decide nothing.

    Raises:
        MissingError: a model lacks a rate or a seed that others have: the study goes on, and its best rate may change.
    """
    (path,), width = rule.files, rule.width
    lines, runs, reasons = [*evidence.files.get(path, ())], [], []
    rates, seeds = ({line[key] for line in lines} for key in ("rate", "seed"))
    for model in models:
        chosen = lines_at_best_rate(lines, {"model": model, "width": width}, loss_of)
        if not chosen:
            raise MissingError(f"{path} has no run of {model} at width {width}")
        tried = {x["rate"] for x in lines if (x["model"], x["width"]) == (model, width)}
        if not tried >= set(rule.rates or rates) or {x["seed"] for x in chosen} != seeds:
            raise MissingError(f"{path} lacks rates or seeds of {model} at width {width}")
        reasons += [f"seed {x['seed']} of {model} failed" for x in chosen if "failed" in x]
        runs.append({x["seed"]: x for x in chosen if "failed" not in x})
    return runs, tuple(reasons)


def _common(runs: Sequence[dict[int, Line]]) -> list[int]:
    seeds = sorted(set.intersection(*(set(x) for x in runs)))
    if not seeds:
        raise MissingError("no seed of all models has finished")
    return seeds


def _points(value: float, difference: object) -> str:
    return f"{100 * value:.1f} points" if difference else f"{100 * value:.1f} %"
