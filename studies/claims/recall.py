"""Rules for the recall study, seed by seed, with each model at its best rate on the validation split."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from scipy.stats import spearmanr

from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.rates import lines_at_best_rate
from flash_lm.sweeps.recall import selection_loss
from studies.claims.evidence import Evidence, MissingError
from studies.protocol.verdict import FEWEST, UNDECIDED, Verdict, judge_seeds


@dataclasses.dataclass(frozen=True)
class RecallGrows:
    """Models with larger states recall more: Spearman's correlation of state bytes and accuracy.

    Attributes:
        files: one path, that of the runs.
        width: width of the models.
        models: names of models with states of several sizes.
        least: smallest accepted correlation.
        rates: rates at which each model must have been trained; default: all rates in the file.
    """

    files: Sequence[str]
    width: int
    models: Sequence[str]
    least: float
    rates: Sequence[float] = ()

    @property
    def text(self) -> str:
        """The rule in words, with its bound."""
        return f"rank correlation of bytes of state and accuracy, width {self.width}, at least {self.least:g}"

    def judge(self, evidence: Evidence) -> Verdict:
        """Judges the correlation of each seed that all models have."""
        runs, reasons = _runs_by_seed(evidence, self, self.models)
        correlations = []
        for seed in _common_seeds(runs):
            lines = [seeds[seed] for seeds in runs]
            correlations.append(rank_correlation([x["state_bytes"] for x in lines], [x["accuracy"] for x in lines]))
        figure = f"rank correlation at width {self.width} {', '.join(f'{x:.2f}' for x in correlations)}"
        return Verdict(
            UNDECIDED if reasons else judge_seeds([x >= self.least for x in correlations], seeds=FEWEST),
            figure,
            reasons,
        )


@dataclasses.dataclass(frozen=True)
class Recalls:
    """The accuracy of a model, or its difference to another's.

    Attributes:
        files: one path, that of the runs.
        width: width of the models.
        first: name of the model.
        second: name of a model whose accuracy is subtracted; None: no subtraction.
        part: part of the test split; None: all of it.
        least: smallest accepted value.
        most: largest accepted value.
        rates: rates at which each model must have been trained; default: all rates in the file.
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
        """The rule in words, with its bounds."""
        bounds = {"at least": self.least, "at most": self.most}
        limits = " and ".join(f"{name} {_format_points(x, self.second)}" for name, x in bounds.items() if abs(x) < 1)
        return f"{self._subject}, width {self.width}, {limits}"

    def judge(self, evidence: Evidence) -> Verdict:
        """Judges the value of each seed that both models have."""
        names = [self.first, *([self.second] if self.second else [])]
        runs, reasons = _runs_by_seed(evidence, self, names)
        accuracies = []
        for seed in _common_seeds(runs):
            value, *other = (self._accuracy(seeds[seed]) for seeds in runs)
            accuracies.append(value - sum(other))
        listed = ", ".join(_format_points(x, self.second) for x in accuracies)
        word = UNDECIDED if reasons else judge_seeds([self.least <= x <= self.most for x in accuracies], seeds=FEWEST)
        return Verdict(word, f"{self._subject} at width {self.width} {listed}", reasons)

    def _accuracy(self, line: Line) -> float:
        return line["accuracy"] if self.part is None else line["by_part"][self.part]

    @property
    def _subject(self) -> str:
        minus = f" minus that of {self.second}" if self.second else ""
        return f"accuracy of {self.first}{minus}{f' in {self.part}' if self.part else ''}"


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Spearman's correlation; 0 if all values of one list are equal, where it is not defined.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    if 1 in (len({*one}), len({*other})):
        return 0.0
    result: Any = spearmanr(one, other)
    return float(result.statistic)


def _runs_by_seed(
    evidence: Evidence, rule: RecallGrows | Recalls, models: Sequence[str]
) -> tuple[list[dict[int, Line]], tuple[str, ...]]:
    """Returns each model's runs at its best rate by seed, and reasons not to decide, if any.

    Raises:
        MissingError: a model lacks a rate or a seed that others have; its best rate may still change.
    """
    (path,), width = rule.files, rule.width
    lines, runs, reasons = [*evidence.files.get(path, ())], [], []
    rates, seeds = ({line[key] for line in lines} for key in ("rate", "seed"))
    for model in models:
        best_lines = lines_at_best_rate(lines, {"model": model, "width": width}, selection_loss)
        if not best_lines:
            raise MissingError(f"{path} has no run of {model} at width {width}")
        tried = {x["rate"] for x in lines if (x["model"], x["width"]) == (model, width)}
        if not tried >= set(rule.rates or rates) or {x["seed"] for x in best_lines} != seeds:
            raise MissingError(f"{path} lacks rates or seeds of {model} at width {width}")
        reasons += [f"seed {x['seed']} of {model} failed" for x in best_lines if "failed" in x]
        runs.append({x["seed"]: x for x in best_lines if "failed" not in x})
    return runs, tuple(reasons)


def _common_seeds(runs: Sequence[dict[int, Line]]) -> list[int]:
    seeds = sorted(set.intersection(*(set(x) for x in runs)))
    if not seeds:
        raise MissingError("no seed of all models has finished")
    return seeds


def _format_points(value: float, difference: object) -> str:
    return f"{100 * value:.1f} points" if difference else f"{100 * value:.1f} %"
