"""Rules that judge claims.

A rule is a frozen dataclass. Its fields are the parameters that it applies and that `text` prints. Ratios are judged by
the interval of their mean over three or more seeds, measurements by two or more runs of a benchmark that all agree.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flash_lm.report.ratios import MeanRatio, spread
from flash_lm.runs.jsonl import Line
from studies.claims.evidence import Evidence, MissingError, Run
from studies.claims.quality import trunks_rule
from studies.claims.recall import RecallGrows, Recalls
from studies.protocol.verdict import (
    ALIKE,
    ARITHMETIC,
    FEWEST,
    NOT_TESTABLE,
    UNDECIDED,
    Rule,
    Verdict,
    bounds,
    judge_interval,
    judge_seeds,
)

BY_SEEDS = ", by the seeds alone"  # the lines of these studies have no blocks of text
SAME_TIME = 1.03  # training times within this factor of each other are alike


class ClaimRule(Protocol):
    """One condition of a claim."""

    @property
    def text(self) -> str:
        """The rule in words, with its threshold."""
        ...

    def judge(self, evidence: Evidence) -> Verdict:
        """Returns the verdict on the evidence; raises MissingError."""
        ...


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The score of one run divided by that of another, seed by seed, on the test split."""

    study: str
    first: str
    second: str
    relation: str
    length: int | None = None
    metric: str = "perplexity"
    margin: float = ALIKE
    judged: bool = True

    @property
    def text(self) -> str:
        """The rule in words, with its bounds; empty if the ratio is only shown and does not decide."""
        if not self.judged:
            return ""
        return f"{self._subject} {bounds(*Rule(self.relation, self.margin).limits)} that of {self.second}{BY_SEEDS}"

    def judge(self, evidence: Evidence) -> Verdict:
        """Judges the mean ratio; undecided if only the validation split was scored, because choices were made on it."""
        pairs = evidence.runs_of_common_seeds(self.study, self.first, self.second)
        logs, reasons = _log_ratios(pairs, self.length, self.metric)
        ratio = MeanRatio(logs, {})
        word = _judge_if_comparable(ratio, Rule(self.relation, self.margin).limits, reasons)
        if not self.judged:
            word, reasons = None, ()
        figure = f"{self._subject} {ratio.text(of=f'that of {self.second}')}"
        return Verdict(word, figure, reasons, _lines(pairs, self.length))

    @property
    def _subject(self) -> str:
        at = f" scored on rows of {self.length}" if self.length else ""
        part = f" ({self.study.partition('/')[2]}{at})" if "/" in self.study else at
        return f"{self.metric.replace('_per_', ' a ')} of {self.first}{part}"


@dataclasses.dataclass(frozen=True)
class Growth:
    """Perplexity grows by a larger factor between two runs than between two other runs."""

    study: str
    of: Sequence[str]
    than: Sequence[str]
    margin: float = ALIKE

    @property
    def text(self) -> str:
        """The rule in words, with its margin."""
        than = self._pair(self.than)
        return f"perplexity of {self._pair(self.of)} more than {self.margin:g} × that of {than}{BY_SEEDS}"

    def judge(self, evidence: Evidence) -> Verdict:
        """Judges the ratio of the two factors, over the seeds that all four runs have."""
        runs = evidence.runs_of_common_seeds(self.study, *self.of, *self.than)
        of, of_reasons = _log_ratios([(after, before) for before, after, _, _ in runs], None, "perplexity")
        than, than_reasons = _log_ratios([(after, before) for _, _, before, after in runs], None, "perplexity")
        reasons = tuple(dict.fromkeys((*of_reasons, *than_reasons)))
        ratio = MeanRatio(np.subtract(of, than), {})
        word = _judge_if_comparable(ratio, (self.margin, math.inf), reasons)
        figures = [f"{self._pair(pair)} {spread(np.exp(x).tolist())}" for pair, x in ((self.of, of), (self.than, than))]
        figures.append(f"the first {ratio.text(of='the second')}")
        return Verdict(word, "; ".join(figures), reasons, _lines(runs))

    def _pair(self, pair: Sequence[str]) -> str:
        return f"{pair[1]} / {pair[0]}"


@dataclasses.dataclass(frozen=True)
class EqualTime:
    """Perplexity of two runs whose schedules end after the same training time.

    A run's time is its number of steps times the time of a step, timed side by side with the other runs (`times`: a
    file whose lines have run and median_ms). The perplexity is never read off the curve of a longer run, because a run
    cut off in mid-schedule has not annealed.
    """

    study: str
    first: str
    second: str
    times: str
    relation: str
    margin: float = ALIKE

    @property
    def text(self) -> str:
        """The rule in words, with both margins."""
        limits = bounds(*Rule(self.relation, self.margin).limits)
        return (
            f"perplexity of {self.first} {limits} that of {self.second}, both at the end of schedules that take the "
            f"same time within a factor of {SAME_TIME:g}, steps timed side by side{BY_SEEDS}"
        )

    def judge(self, evidence: Evidence) -> Verdict:
        """Judges the mean ratio; undecided unless the training times agree.

        The figure says so if both runs took the same number of steps.
        """
        pairs = evidence.runs_of_common_seeds(self.study, self.first, self.second)
        logs, reasons = _log_ratios(pairs, None, "perplexity")
        ratio = MeanRatio(logs, {})
        steps = {tuple(_test_score(run, None)[0]["step"] for run in pair) for pair in pairs}
        figure, lines = f"perplexity of {self.first} {ratio.text(of=f'that of {self.second}')}", _lines(pairs)
        if all(one == other for one, other in steps):
            figure += " at equal steps"
        try:
            step_ms = [evidence.value(self.times, "median_ms", {"run": name}) for name in (self.first, self.second)]
        except MissingError:
            return Verdict(UNDECIDED, figure, ("no steps timed side by side", *reasons), lines)
        for pair in steps:
            seconds = [ms * count / 1000 for ms, count in zip(step_ms, pair, strict=True)]
            if max(seconds) > SAME_TIME * min(seconds):
                ends = " and ".join(f"{x:.0f}" for x in seconds)
                return Verdict(UNDECIDED, figure, (f"the schedules end after {ends} s", *reasons), lines)
        word = _judge_if_comparable(ratio, Rule(self.relation, self.margin).limits, reasons)
        return Verdict(word, f"{figure} after the same time", reasons, lines)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured value, or its ratio to another, in each file. A file is one run of a benchmark.

    Attributes:
        files: paths.
        value: key of the value in a line.
        what: the measured quantity, in words.
        first: entries that a line must have; the largest value of the matching lines is used.
        second: the same for the divisor; None: no divisor.
        least: smallest accepted value.
        most: largest accepted value.
        judged: whether the value decides; otherwise it is only shown.
    """

    files: Sequence[str]
    value: str
    what: str
    first: Mapping[str, Any]
    second: Mapping[str, Any] | None = None
    least: float = 0.0
    most: float = math.inf
    judged: bool = True

    @property
    def text(self) -> str:
        """The rule in words, with its bounds; empty if the value does not decide."""
        return f"{self.what} {bounds(self.least, self.most, '')}".strip() if self.judged else ""

    def judge(self, evidence: Evidence) -> Verdict:
        """Judges the value of each run of the benchmark; all must agree."""
        values = [self._value_in(evidence, path) for path in self.files]
        asked = f" of {self.least:,g}" if self.least and self.second else ""
        figures = ", ".join(f"{x:,.{_decimals(x)}f}{asked}" for x in values)
        runs = f"{len(values)} runs" if len(values) > 1 else "one run"
        word = judge_seeds([self.least <= x <= self.most for x in values], seeds=FEWEST) if self.judged else None
        entries = [x for x in (self.first, self.second) if x]
        matching_lines = lambda path: [
            x for x in evidence.files.get(path, ()) if any(y.items() <= x.items() for y in entries)
        ]
        return Verdict(
            word, f"{self.what} {figures} ({runs})", (), tuple(x for path in self.files for x in matching_lines(path))
        )

    def _value_in(self, evidence: Evidence, path: str) -> float:
        first = evidence.value(path, self.value, self.first)
        return first / evidence.value(path, self.value, self.second) if self.second else first


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """A figure that follows from sizes alone: one product divided by another."""

    what: str
    over: Sequence[float]
    under: Sequence[float]

    @property
    def text(self) -> str:
        """The formula."""
        return self.what

    def judge(self, evidence: Evidence) -> Verdict:
        """Returns `ARITHMETIC` with the computed figure: nothing was run."""
        del evidence
        product = " / ".join("·".join(f"{x:g}" for x in factors) for factors in (self.over, self.under))
        return Verdict(ARITHMETIC, f"{product} = {math.prod(self.over) / math.prod(self.under):.3g}")


@dataclasses.dataclass(frozen=True)
class Untestable:
    """A claim that cannot be tested at this scale."""

    why: str

    @property
    def text(self) -> str:
        """Empty: no rule applies."""
        return ""

    def judge(self, evidence: Evidence) -> Verdict:
        """Returns `NOT_TESTABLE` with the reason."""
        del evidence
        return Verdict(NOT_TESTABLE, self.why)


RULES = {
    "ratio": Ratio,
    "growth": Growth,
    "equal time": EqualTime,
    "measured": Measured,
    "recall grows": RecallGrows,
    "recalls": Recalls,
    "arithmetic": Arithmetic,
    "untestable": Untestable,
    "trunks": trunks_rule,
}


def _test_score(run: Run, length: int | None) -> tuple[Line, str]:
    """Returns the line of the test split and ""; if it is missing, that of the validation split and what is wrong."""
    if line := run.line("test", length):
        return line, ""
    if line := run.line("validation", length):
        return line, "scored on the validation split alone, on which choices were made"
    raise MissingError(f"not scored on rows of {length or run.trained_at}")


def _lines(groups: Sequence[tuple[Run, ...]], length: int | None = None) -> tuple[Line, ...]:
    return tuple(_test_score(run, length)[0] for group in groups for run in group)


def _log_ratios(
    pairs: Sequence[tuple[Run, ...]], length: int | None, metric: str
) -> tuple[list[float], tuple[str, ...]]:
    """Returns log(first / second) for each seed, and reasons not to decide, if any."""
    logs, reasons = [], {}
    for one, other in pairs:
        (a, why), (b, _) = _test_score(one, length), _test_score(other, length)
        reasons[why] = None
        if (a["split"], a["corpus"], a["bytes"]) != (b["split"], b["corpus"], b["bytes"]):
            reasons["not scored on the same text"] = None
        logs.append(math.log(a[metric] / b[metric]))
    return logs, tuple(filter(None, reasons))


def _judge_if_comparable(ratio: MeanRatio, limits: tuple[float, float], reasons: Sequence[str]) -> str:
    return UNDECIDED if reasons else judge_interval(ratio, limits)


def _decimals(x: float) -> int:
    return 0 if abs(x) >= 100 else 2 if abs(x) >= 1 else 3
