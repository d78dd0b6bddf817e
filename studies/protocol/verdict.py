"""Verdicts on claims that were made before the runs: their words, and the rules that decide.

A rule is a relation, a margin and a metric: one model's score is better than another's, no worse, or alike, within the
margin. Ratios of perplexities are judged by the interval of their mean, differences of accuracies seed by seed.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.report.ratios import SEEDS, MeanRatio
from flash_lm.runs.jsonl import Line

HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "undecided", "not run"
ARITHMETIC, NOT_TESTABLE = "by arithmetic", "not testable here"
WORDS = (HOLDS, UNDECIDED, FAILS, ARITHMETIC, NOT_TESTABLE, NOT_RUN)
_WORD = {True: HOLDS, False: FAILS, None: UNDECIDED}

FEWEST = 2  # seeds of accuracies, or runs of a benchmark, that a claim needs
ALIKE = 1.02  # perplexities within this factor of each other are alike
RATIO, DIFFERENCE = "ratio", "difference"
# metric -> relation -> the bounds of the first model's score over the second's, or minus it, by the margin
_LIMITS = {
    RATIO: {
        "better": lambda margin: (0.0, 1 / margin),
        "no worse": lambda margin: (0.0, margin),
        "alike": lambda margin: (1 / margin, margin),
    },
    DIFFERENCE: {
        "better": lambda margin: (margin, math.inf),
        "no worse": lambda margin: (-margin, math.inf),
        "alike": lambda margin: (-margin, margin),
    },
}
BY_INTERVAL = (
    "Ratios of perplexities: the geometric mean over seeds, and its 95 % interval, from the variance of the seeds, the "
    f"text and the times. A verdict needs {SEEDS} seeds and an interval that is all inside the bounds, or all outside. "
    "Power: the probability of a verdict, if mean and spreads are the observed ones."
)
_COLUMNS: Columns = {
    "": ("number", "{}"),
    "hypothesis": ("hypothesis", "{}"),
    "verdict": ("verdict", "{}"),
    "figure": ("figure", "{}"),
}


class Rule(NamedTuple):
    """A relation that the scores of two models must satisfy.

    Attributes:
        relation: "better", "no worse" or "alike".
        margin: a factor of perplexity (`RATIO`), or a difference of accuracy (`DIFFERENCE`).
        metric: `RATIO`, where less is better, or `DIFFERENCE`, where more is better.
    """

    relation: str
    margin: float = ALIKE
    metric: str = RATIO

    @property
    def limits(self) -> tuple[float, float]:
        """The bounds of the ratio or difference.

        >>> Rule("better", 0.1, DIFFERENCE).limits
        (0.1, inf)
        """
        return _LIMITS[self.metric][self.relation](self.margin)

    def holds(self, value: float, error: float | None = None) -> bool | None:
        """Returns whether one seed's value is within the bounds; None: it is closer to a bound than its error."""
        low, high = self.limits
        if error is not None and min(abs(value - low), abs(value - high)) <= error:
            return None
        return low <= value <= high


def judge_interval(ratio: MeanRatio, limits: tuple[float, float]) -> str:
    """Returns the verdict on a mean over seeds: its interval must be all inside the bounds, or all outside."""
    return _WORD[ratio.is_within(*limits)]


def judge_seeds(held: Sequence[bool | None], lost: bool = False, seeds: int = SEEDS) -> str:
    """Returns the verdict on results seed by seed, or run by run: they must be enough, and all must agree.

    Args:
        held: for each seed with a figure, whether the claim held; None: too close to decide.
        lost: whether another seed was run and has no figure.
        seeds: the number that is enough.

    >>> judge_seeds([True, True, True]), judge_seeds([True, False, True])
    ('holds', 'undecided')
    """
    if not held and not lost:
        return NOT_RUN
    if lost or len(held) < seeds or len(set(held)) > 1:
        return UNDECIDED
    return _WORD[held[0]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a rule.

    Attributes:
        word: one of WORDS; None: not judged.
        figure: the numbers behind it, in words.
        reasons: reasons not to decide.
        lines: lines of results that the figure is computed from.
        numbers: further fields of the verdict's line.
    """

    word: str | None
    figure: str
    reasons: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    numbers: Line = dataclasses.field(default_factory=dict)

    def line(self, **about: object) -> Line:
        """Returns the line of verdicts.jsonl; the fields `about` come first."""
        return {**about, "verdict": self.word, "figure": self.figure, **self.numbers}

    @property
    def size(self) -> str:
        """The sizes of the models and lengths of training, in words; empty if the lines do not have them."""
        tokens = [line["step"] * line["batch_tokens"] for line in self.lines if {"step", "batch_tokens"} <= line.keys()]
        named = {
            "parameters": [line[key] for line in self.lines for key in ("parameters", "params") if key in line],
            "steps": [line["step"] for line in self.lines if "step" in line],
            "tokens of training": tokens,
        }
        return ", ".join(f"{_format_range(numbers)} {what}" for what, numbers in named.items() if numbers)


def bounds(low: float, high: float, times: str = " ×") -> str:
    """Formats the interval in which a ratio must be.

    >>> bounds(0.0, 1.02)
    'at most 1.02 ×'
    """
    if low <= 0:
        return f"at most {high:.4g}{times}"
    return f"at least {low:.4g}{times}" if math.isinf(high) else f"between {low:.4g} and {high:.4g}{times}"


def verdict_table(rule: str, lines: Sequence[Line]) -> str:
    """Returns a Markdown table of verdicts.

    Args:
        rule: the rule that judged them, in words.
        lines: lines with number, hypothesis, verdict and figure.
    """
    return f"{rule}\n\n{markdown_table(lines, _COLUMNS)}"


def _format_range(numbers: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{x / 1e6:.3g}M" if x >= 1e5 else f"{x:,}" for x in (min(numbers), max(numbers))))
