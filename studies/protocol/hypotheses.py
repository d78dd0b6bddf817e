"""Verdicts on the hypotheses of a study of trunks, by rules that are set before its runs.

A hypothesis compares the perplexities of two models, in the geometric mean over seeds. One 95 % interval decides. Its
variance is that of the seeds plus that of the scored text, and at equal time also that of the step times.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import numpy as np

from flash_lm.report.ratios import (
    SEEDS,
    STRETCHES,
    MeanRatio,
    NoFigureError,
    Variance,
    loss_at,
    variance_of_mean,
    variance_of_text,
)
from flash_lm.runs.jsonl import Line, group_lines
from studies.protocol.verdict import NOT_RUN, UNDECIDED, Rule, Verdict, bounds, judge_interval

_POWER_SEEDS = (3, 5, 7)  # numbers of seeds for which the power is reported
_FEWEST_ROUNDS = 10  # of a timing, two in each stretch
_FEWEST_BLOCKS = 20  # of a text, from which its error is known


def step_name(part: str, model: str) -> str:
    """Returns the name of a model's step in step_times.jsonl."""
    return f"{part} {model}"


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A claim that the perplexity of one model is "better" than, "no worse" than, or "alike" that of another.

    Attributes:
        number: number in the design of the study; several hypotheses may share it.
        part: part of the study.
        first: name of the first model.
        relation: see `Rule`.
        second: name of the second model.
        slice: slice of the targets; None: all of them.
        at_equal_time: compares at the training time of the quicker model, not at the full budget of both.
        guess: perplexity of a uniform guess. If both models are above guess / e, there is no figure: neither has
            learned enough for a comparison. None: no such condition.
    """

    number: int
    part: str
    first: str
    relation: str
    second: str
    slice: str | None = None
    at_equal_time: bool = False
    guess: float | None = None

    @property
    def text(self) -> str:
        """The hypothesis in words, with its threshold."""
        of = f" on the slice {self.slice}" if self.slice else ""
        at = "time" if self.at_equal_time else "tokens"
        limits = bounds(*self._limits)
        known = f", if one of them is below {self.guess / math.e:,.0f}" if self.guess else ""
        return f"{self.part}: {self.first}{of} {limits} {self.second}, at equal {at}{known}"

    @property
    def _limits(self) -> tuple[float, float]:
        return Rule(self.relation).limits

    def judge(self, lines: Sequence[Line], times: Sequence[Line]) -> Verdict:
        """Decides by the 95 % interval of the mean ratio.

        Args:
            lines: lines of runs, see `trunk_job`.
            times: lines whose `run` is `step_name`, with rounds_ms.

        Returns:
            The verdict. Its numbers, where known: `ratios` by seed; their geometric mean `ratio`; `low` and `high`, the
            bounds of the 95 % interval; `shares` of the variance (seeds, text, times); and `power`, the probability of
            a verdict by number of seeds.
        """
        # Differences of losses per seed; a pair that cannot be compared gives a reason.
        pairs, steps = [*self._pairs(lines)], best_timings(times)
        targets = {
            _targets(line) for _, *both in pairs for model_lines in both for line in model_lines if "failed" not in line
        }
        differences: dict[int, np.ndarray] = {}
        reasons = []
        for seed, one, other in pairs:
            try:
                differences[seed] = self._differences(one, other, targets, steps)
            except NoFigureError as error:
                reasons.append(str(error))
        # The mean over seeds and its interval decide, if no seed is missing.
        word, numbers = UNDECIDED if pairs else NOT_RUN, {}
        figure = [*dict.fromkeys(reasons)]
        if differences:
            ratio = self._over_seeds(np.array([*differences.values()]), np.array(targets.pop()[2:]), steps)
            words, numbers = self._describe(ratio, [*differences])
            figure = [*words, *figure]
            word = UNDECIDED if reasons else judge_interval(ratio, self._limits)
        budgets = slice(None) if self.at_equal_time else slice(-1, None)
        read = tuple(line for _, *both in pairs for model_lines in both for line in model_lines[budgets])
        return Verdict(word, "; ".join(figure), (), read, numbers)

    def verdict_line(self, lines: Sequence[Line], times: Sequence[Line]) -> Line:
        """Returns the line of verdicts.jsonl, see `judge`."""
        return self.judge(lines, times).line(number=self.number, hypothesis=self.text)

    def _pairs(self, lines: Sequence[Line]) -> Iterator[tuple[int, list[Line], list[Line]]]:
        """Yields each seed that both models have, with the lines of each by increasing budget."""
        lines_by_seed: dict[str, dict[int, list[Line]]] = {self.first: {}, self.second: {}}
        for line in sorted(lines, key=lambda line: line.get("share", 0)):
            if line["part"] == self.part and line["run"] in lines_by_seed and self._is_test_score(line):
                lines_by_seed[line["run"]].setdefault(line["seed"], []).append(line)
        one, other = lines_by_seed.values()
        yield from ((seed, one[seed], other[seed]) for seed in sorted(one.keys() & other))

    def _is_test_score(self, line: Line) -> bool:
        if "failed" in line:
            return True
        at = line["split"], line["length"], line.get("slice")
        return at == ("test", line["trained_length"], self.slice)

    def _differences(
        self, one: list[Line], other: list[Line], targets: Set[tuple], steps: Mapping[str, Line]
    ) -> np.ndarray:
        """Returns losses of the first model minus those of the second in N blocks of the text, RxN.

        R is 1; at equal time it is 3: for the mean ratio of the step times, and for one standard error less and more.
        """
        # Reasons for no figure: failed runs, other targets, models that have not learned, too few blocks.
        for line in (*one, *other):
            if "failed" in line:
                raise NoFigureError(f"{line['run']} failed with seed {line['seed']}")
        if len(targets) > 1:
            raise NoFigureError("not scored on the same targets")
        last = one[-1], other[-1]  # of the full budget
        if self.guess and min(line["perplexity"] for line in last) > self.guess / math.e:
            raise NoFigureError(
                f"neither is below {self.guess / math.e:,.0f}, the perplexity of a uniform guess over e"
            )
        if (blocks := len(last[0]["tokens_blocks"])) < _FEWEST_BLOCKS:
            raise NoFigureError(f"scored in {blocks} blocks of text, too few to know its error")
        if self.at_equal_time:
            log, (variance, _) = self._step_ratio(steps)
            ratios = [math.exp(log + k * math.sqrt(variance)) for k in (0, -1, 1)]
            differences_RxN = np.array([_differences_at_equal_time(one, other, ratio) for ratio in ratios])
        else:
            differences_RxN = (_nll(last[0]) - _nll(last[1]))[None]
        if not np.isfinite(differences_RxN).all():
            raise NoFigureError("a score is not finite")
        return differences_RxN

    def _over_seeds(self, differences_SxRxN: np.ndarray, tokens_N: np.ndarray, steps: Mapping[str, Line]) -> MeanRatio:
        """Returns the mean over seeds; the errors of the text and of the step times are the same for all seeds."""
        logs_SxR = differences_SxRxN.sum(-1) / tokens_N.sum()
        shared = {"text": variance_of_text(differences_SxRxN[:, 0].mean(0), tokens_N)}
        if self.at_equal_time:
            _, less, more = logs_SxR.mean(0)
            shared["times"] = Variance(((more - less) / 2) ** 2, self._step_ratio(steps)[1].freedom)
        return MeanRatio(logs_SxR[:, 0], shared)

    def _describe(self, ratio: MeanRatio, seeds: Sequence[int]) -> tuple[list[str], Line]:
        """Returns the mean ratio, its interval and its power, in words and as numbers of a line."""
        words = [ratio.text(of=self.second)]
        line: Line = {"ratio": ratio.mean, "ratios": dict(zip(map(str, seeds), ratio.ratios, strict=True))}
        if len(seeds) > 1:
            low, high = ratio.interval
            line |= {"low": low, "high": high, "shares": ratio.shares}
        if len(seeds) >= SEEDS:
            line["power"] = {str(n): ratio.power(*self._limits, n) for n in _POWER_SEEDS}
            powers = (f"{x:.2f}" for x in line["power"].values())
            words.append(f"power at {', '.join(line['power'])} seeds: {', '.join(powers)}")
        return words, line

    def _step_ratio(self, steps: Mapping[str, Line]) -> tuple[float, Variance]:
        """Returns log(step time of the first / step time of the second) and its variance.

        Each ratio is within one round. The estimate is the mean of the medians of a few stretches of the rounds.
        """
        rounds = []
        for run in (self.first, self.second):
            if (name := step_name(self.part, run)) not in steps:
                raise NoFigureError(f"the step of {run} was not timed")
            rounds.append(steps[name].get("rounds_ms"))
        if None in rounds:
            raise NoFigureError(f"{self.first} and {self.second} were timed without their rounds: time them again")
        logs = [math.log(ours / theirs) for ours, theirs in zip(*rounds, strict=False)]  # a slow step has one round
        if len(logs) < _FEWEST_ROUNDS:
            raise NoFigureError(
                f"{self.first} and {self.second} were timed together in {len(logs)} rounds: time them in "
                f"{_FEWEST_ROUNDS} or more"
            )
        # The machine is slow for several rounds at a time: medians of stretches are nearly independent.
        medians = [statistics.median(part) for part in np.array_split(logs, STRETCHES)]
        return statistics.fmean(medians), variance_of_mean(medians)


def best_timings(times: Sequence[Line]) -> dict[str, Line]:
    """Returns the line of each step by name, from each part's timing with the most rounds (the last of equals)."""
    best: dict[str, list[Line]] = {}
    for timing in sorted(_timings(times), key=lambda timing: timing[0].get("rounds", 0)):
        best[_part_name(timing[0])] = timing
    return {line["run"]: line for timing in best.values() for line in timing}


def _timings(times: Sequence[Line]) -> Iterable[list[Line]]:
    """Groups lines of steps that took turns: same part, configs, device and number of rounds."""
    return group_lines(
        [line | {"part": _part_name(line)} for line in times], "part", "config_hash", "device", "rounds"
    ).values()


def _part_name(line: Line) -> str:
    return line["run"].partition(" ")[0]


def _targets(line: Line) -> tuple:
    """Returns what identifies the scored targets: corpus, split, and tokens of each block."""
    return line["corpus_hash"], line["split"], *line["tokens_blocks"]


def _nll(line: Line) -> np.ndarray:
    return np.array(line["nll_blocks"])


def _differences_at_equal_time(one: list[Line], other: list[Line], ratio: float) -> np.ndarray:
    """Returns differences of losses at the training time of the quicker model, for this ratio of step times."""
    curves = [[(line["step"] * step, _nll(line)) for line in lines] for lines, step in ((one, ratio), (other, 1.0))]
    end = min(curve[-1][0] for curve in curves)
    first_N, second_N = (loss_at(curve, end) for curve in curves)
    return first_N - second_N
