"""Verdicts on the hypotheses of a study of trunks, by rules that are set before its runs.

A hypothesis says how one model's perplexity stands to another's, in the mean over seeds. One interval decides, with the
spread of the seeds, the error of the text that was scored, and at equal time that of the times of steps.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import numpy as np

from flash_lm.runs.jsonl import Line, group_lines
from studies.protocol.ratios import (
    SEEDS,
    STRETCHES,
    MeanRatio,
    NoFigureError,
    Variance,
    loss_at,
    variance_of_mean,
    variance_of_text,
)
from studies.protocol.verdict import NOT_RUN, UNDECIDED, Rule, Verdict, bounds, by_interval

_PLANNED = (3, 5, 7)  # numbers of seeds of which the power is told
_FEWEST_ROUNDS = 10  # of a timing, two in each stretch
_FEWEST_BLOCKS = 20  # of a text, from which its error is known


def step_name(part: str, model: str) -> str:
    """What names a model's step among the steps that are timed."""
    return f"{part} {model}"


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """That the perplexity of one model is "better" than, "no worse" than, or "alike" that of another.

    Attributes:
        number: in the design of the study; a number may have several hypotheses.
        part: of the study.
        first: the model.
        relation: see `Rule`.
        second: the other model.
        slice: of the targets; None: all of them.
        at_equal_time: not at the whole budget of both, but at the training time of the one that needs less.
        guess: the perplexity of a uniform guess. Where both models are above guess / e there is no figure: neither
            has learned enough for a comparison. None: not asked.
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
        """In words, with its threshold."""
        of = f" on the slice {self.slice}" if self.slice else ""
        at = "time" if self.at_equal_time else "tokens"
        limits = bounds(*self._limits)
        known = f", if one of them is below {self.guess / math.e:,.0f}" if self.guess else ""
        return f"{self.part}: {self.first}{of} {limits} {self.second}, at equal {at}{known}"

    @property
    def _limits(self) -> tuple[float, float]:
        return Rule(self.relation).limits

    def judge(self, lines: Sequence[Line], times: Sequence[Line]) -> Verdict:
        """The verdict, by the interval of the mean.

        Args:
            lines: of runs, see `trunk_job`.
            times: lines whose `run` is `step_name`, with rounds_ms.

        Returns:
            Its numbers are, as far as there are any, `ratios` by seed, their geometric mean `ratio`, `low` and `high`,
            which end its 95 % interval, the `shares` of the variance (seeds, text, times), and the `power` of a verdict
            by number of seeds.
        """
        pairs, steps = [*self._pairs(lines)], timed_steps(times)
        targets = {_targets(line) for _, *both in pairs for own in both for line in own if "failed" not in line}
        found: dict[int, np.ndarray] = {}
        reasons = []
        for seed, one, other in pairs:
            try:
                found[seed] = self._differences(one, other, targets, steps)
            except NoFigureError as error:
                reasons.append(str(error))
        word, told = UNDECIDED if pairs else NOT_RUN, {}
        figure = [*dict.fromkeys(reasons)]
        if found:
            ratio = self._over_seeds(np.array([*found.values()]), np.array(targets.pop()[2:]), steps)
            words, told = self._told(ratio, [*found])
            figure = [*words, *figure]
            word = UNDECIDED if reasons else by_interval(ratio, self._limits)
        budgets = slice(None) if self.at_equal_time else slice(-1, None)
        read = tuple(line for _, *both in pairs for own in both for line in own[budgets])
        return Verdict(word, "; ".join(figure), (), read, told)

    def verdict_line(self, lines: Sequence[Line], times: Sequence[Line]) -> Line:
        """The line of the verdict, see `judge`."""
        return self.judge(lines, times).line(number=self.number, hypothesis=self.text)

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

    def _differences(
        self, one: list[Line], other: list[Line], targets: Set[tuple], steps: Mapping[str, Line]
    ) -> np.ndarray:
        """Losses of the first minus those of the second in N blocks of the text, RxN.

        R is 1, but at equal time 3: if the times of steps have their mean ratio, or one standard error less, or more.
        """
        for line in (*one, *other):
            if "failed" in line:
                raise NoFigureError(f"{line['run']} failed with seed {line['seed']}")
        if len(targets) > 1:
            raise NoFigureError("not scored on the same targets")
        last = one[-1], other[-1]
        if self.guess and min(line["perplexity"] for line in last) > self.guess / math.e:
            raise NoFigureError(
                f"neither is below {self.guess / math.e:,.0f}, the perplexity of a uniform guess over e"
            )
        if (blocks := len(last[0]["tokens_blocks"])) < _FEWEST_BLOCKS:
            raise NoFigureError(f"scored in {blocks} blocks of text, too few to know its error")
        if self.at_equal_time:
            log, (variance, _) = self._step_ratio(steps)
            ratios = [math.exp(log + k * math.sqrt(variance)) for k in (0, -1, 1)]
            found_RxN = np.array([_at_equal_time(one, other, ratio) for ratio in ratios])
        else:
            found_RxN = (_nll(last[0]) - _nll(last[1]))[None]
        if not np.isfinite(found_RxN).all():
            raise NoFigureError("a score is not finite")
        return found_RxN

    def _over_seeds(self, found_SxRxN: np.ndarray, tokens_N: np.ndarray, steps: Mapping[str, Line]) -> MeanRatio:
        """The text is the same for all seeds, and so are the times of steps."""
        logs_SxR = found_SxRxN.sum(-1) / tokens_N.sum()
        shared = {"text": variance_of_text(found_SxRxN[:, 0].mean(0), tokens_N)}
        if self.at_equal_time:
            _, less, more = logs_SxR.mean(0)
            shared["times"] = Variance(((more - less) / 2) ** 2, self._step_ratio(steps)[1].freedom)
        return MeanRatio(logs_SxR[:, 0], shared)

    def _told(self, ratio: MeanRatio, seeds: Sequence[int]) -> tuple[list[str], Line]:
        """What was found, in words and in numbers."""
        words = [ratio.text(of=self.second)]
        line: Line = {"ratio": ratio.mean, "ratios": dict(zip(map(str, seeds), ratio.ratios, strict=True))}
        if len(seeds) > 1:
            low, high = ratio.ends
            line |= {"low": low, "high": high, "shares": ratio.shares}
        if len(seeds) >= SEEDS:
            line["power"] = {str(n): ratio.power(*self._limits, n) for n in _PLANNED}
            powers = (f"{x:.2f}" for x in line["power"].values())
            words.append(f"power at {', '.join(line['power'])} seeds: {', '.join(powers)}")
        return words, line

    def _step_ratio(self, steps: Mapping[str, Line]) -> tuple[float, Variance]:
        """The logarithm of the first one's time of a step over the second one's, each ratio of one round.

        It is the mean of the medians of a few stretches of the timing.
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


def timed_steps(times: Sequence[Line]) -> dict[str, Line]:
    """The line of each step. Those of a part are of one timing: the one with the most rounds, and of these the last."""
    best: dict[str, list[Line]] = {}
    for timing in sorted(_timings(times), key=lambda timing: timing[0].get("rounds", 0)):
        best[_part_of(timing[0])] = timing
    return {line["run"]: line for timing in best.values() for line in timing}


def _timings(times: Sequence[Line]) -> Iterable[list[Line]]:
    """Lines of steps that took turns: other models, another machine or other rounds make another timing."""
    return group_lines(
        [line | {"part": _part_of(line)} for line in times], "part", "config_hash", "device", "rounds"
    ).values()


def _part_of(line: Line) -> str:
    return line["run"].partition(" ")[0]


def _targets(line: Line) -> tuple:
    """What was scored, and the tokens of each block of it."""
    return line["corpus_hash"], line["split"], *line["tokens_blocks"]


def _nll(line: Line) -> np.ndarray:
    return np.array(line["nll_blocks"])


def _at_equal_time(one: list[Line], other: list[Line], ratio: float) -> np.ndarray:
    """Differences of losses at the end of the one that needs less, for this ratio of the times of their steps."""
    curves = [[(line["step"] * step, _nll(line)) for line in own] for own, step in ((one, ratio), (other, 1.0))]
    end = min(curve[-1][0] for curve in curves)
    first_N, second_N = (loss_at(curve, end) for curve in curves)
    return first_N - second_N
