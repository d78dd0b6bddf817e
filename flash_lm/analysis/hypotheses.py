"""Verdicts on the hypotheses of a study of trunks, by rules that are set before its runs.

A hypothesis says how one model's perplexity stands to another's. It is judged seed by seed, and only seeds that all
agree decide: each by more than the error of the text that was scored, and all together by more than they differ.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from flash_lm.analysis.ratios import NoFigureError, Ratio, loss_at, over_seeds, ratio_of
from flash_lm.analysis.relations import ALIKE, RELATIONS, bounds, spread
from flash_lm.analysis.table import Columns, markdown_table
from flash_lm.analysis.verdicts import NOT_RUN
from flash_lm.jsonl import Line, grouped
from flash_lm.trunk_study import step_name

SEEDS = 3  # that a verdict needs
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
        held: whether the hypothesis held, with each seed that has a figure; a None: too near to tell.
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
        limits = bounds(*RELATIONS[self.relation](ALIKE))
        known = f", if one of them is below {self.guess / math.e:,.0f}" if self.guess else ""
        return f"{self.part}: {self.first}{of} {limits} {self.second}, at equal {at}{known}"

    def judge(self, lines: Sequence[Line], times: Sequence[Line]) -> Line:
        """The verdict.

        Args:
            lines: of `run_trunks`.
            times: lines whose `run` is `step_name`, with microbatch_ms and iqr_ms.

        Returns:
            A line with number, hypothesis, verdict, figure, and, as far as there are any, `ratios` by seed and their
            `errors`: half of the 95 % interval of the logarithm, from the blocks of the text. At equal time an error is
            the farthest end of that interval when half of its interquartile range is taken from the time of one model's
            step, and added to the other's. `seeds_error` is that of the mean, from the ratios of the seeds.
        """
        steps = timed_steps(times)
        found: dict[int, Ratio] = {}
        reasons = []
        for seed, one, other in self._pairs(lines):
            try:
                found[seed] = self._ratio(one, other, steps)
            except NoFigureError as error:
                reasons.append(str(error))
        ratios, limits = [x.value for x in found.values()], RELATIONS[self.relation](ALIKE)
        held = [x.is_within(*limits) for x in found.values()]
        error = max((x.error for x in found.values()), default=0.0)
        known = [f"± {100 * math.expm1(error):.1f} % by the text{' and the times' if self.at_equal_time else ''}"]
        together = over_seeds(ratios) if len(ratios) > 1 else None
        if together:
            known.append("{:.3f} to {:.3f} by the seeds".format(*together.ends))
            held += [None] if together.is_within(*limits) is None else []
        figure = [f"{spread(ratios)} {self.second} (95 %: {', '.join(known)})"] if ratios else []
        return {
            "number": self.number,
            "hypothesis": self.text,
            "verdict": decided_by_seeds(held, lost=bool(reasons)),
            "figure": "; ".join([*figure, *dict.fromkeys(reasons)]),
            "ratios": {str(seed): ratio.value for seed, ratio in found.items()},
            "errors": {str(seed): ratio.error for seed, ratio in found.items()},
            "seeds_error": together and together.error,
        }

    def read_of(self, lines: Sequence[Line]) -> list[Line]:
        """The lines on which the verdict rests."""
        budgets = slice(None) if self.at_equal_time else slice(-1, None)
        return [line for _, *both in self._pairs(lines) for own in both for line in own[budgets]]

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

    def _ratio(self, one: list[Line], other: list[Line], steps: Mapping[str, Line]) -> Ratio:
        for line in (*one, *other):
            if "failed" in line:
                raise NoFigureError(f"{line['run']} failed with seed {line['seed']}")
        if len({(x["corpus_hash"], x["split"], *x["tokens_blocks"]) for x in (*one, *other)}) > 1:
            raise NoFigureError("not scored on the same targets")
        if self.guess and min(one[-1]["perplexity"], other[-1]["perplexity"]) > self.guess / math.e:
            raise NoFigureError(
                f"neither is below {self.guess / math.e:,.0f}, the perplexity of a uniform guess over e"
            )
        if not self.at_equal_time:
            return ratio_of(_nll(one[-1]), _nll(other[-1]), np.array(one[-1]["tokens_blocks"]))
        at, *ends = (_at_equal_time(one, other, steps, halves) for halves in ((0, 0), (-1, 1), (1, -1)))
        return at._replace(error=max(abs(math.log(x.value / at.value)) + x.error for x in (at, *ends)))


def timed_steps(times: Sequence[Line]) -> dict[str, Line]:
    """The line of each step. Those of a part are of one timing: the one with the most rounds, and of these the last."""
    best: dict[str, list[Line]] = {}
    for timing in sorted(_timings(times), key=lambda timing: timing[0].get("rounds", 0)):
        best[_part_of(timing[0])] = timing
    return {line["run"]: line for timing in best.values() for line in timing}


def _timings(times: Sequence[Line]) -> Iterable[list[Line]]:
    """Lines of steps that took turns: other models, another machine or other rounds make another timing."""
    return grouped(
        [line | {"part": _part_of(line)} for line in times], "part", "config_hash", "device", "rounds"
    ).values()


def _part_of(line: Line) -> str:
    return line["run"].partition(" ")[0]


def verdict_table(found: Sequence[Line], figures: str = "Ratios of perplexities", beyond: str = "its error") -> str:
    """Markdown.

    Args:
        found: lines with number, hypothesis, verdict and figure, such as those of `Hypothesis.judge`.
        figures: what the figures are.
        beyond: what each seed must be beyond.
    """
    needs = f"{figures}, seed by seed; a verdict needs {SEEDS} seeds that agree, each beyond {beyond}."
    return f"{needs}\n\n{markdown_table(found, _COLUMNS)}"


def _nll(line: Line) -> np.ndarray:
    return np.array(line["nll_blocks"])


def _at_equal_time(one: list[Line], other: list[Line], steps: Mapping[str, Line], halves: tuple[int, int]) -> Ratio:
    """At the end of the one that needs less; so many halves of the interquartile range are added to a step's time."""
    curves = [_against_time(lines, steps, half) for lines, half in zip((one, other), halves, strict=True)]
    end = min(curve[-1][0] for curve in curves)
    first_N, second_N = (loss_at(curve, end) for curve in curves)
    return ratio_of(first_N, second_N, np.array(one[-1]["tokens_blocks"]))


def _against_time(lines: Sequence[Line], steps: Mapping[str, Line], half: int) -> list[tuple[float, np.ndarray]]:
    """Minutes of training and losses of each budget."""
    name = step_name(lines[0]["part"], lines[0]["run"])
    if name not in steps:
        raise NoFigureError(f"the step of {lines[0]['run']} was not timed")
    step_ms = steps[name]["microbatch_ms"] + half * steps[name]["iqr_ms"] / 2
    return [(line["step"] * step_ms / 60_000, _nll(line)) for line in lines]
