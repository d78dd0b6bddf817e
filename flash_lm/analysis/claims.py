"""Verdicts on claims, from the losses of runs that share their seeds and differ in one thing, or from measurements."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from flash_lm.analysis.results import Line

REPRODUCED, CONTRADICTED = "reproduced at small scale", "contradicted at small scale"
UNDECIDED, NOT_RUN, NOT_TESTABLE = "undecided at small scale", "not run", "not testable here"
ALIKE = 1.02  # perplexities within this ratio are called alike


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found of a claim: one of the words above, and the figure with its spread."""

    word: str
    figure: str


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of a run of the study.

    Attributes:
        scores: what it scored on rows of several lengths, by length.
        trained_at: the length that it was trained at.
        curve: its validation lines in order.
    """

    scores: Mapping[int, Line]
    trained_at: int
    curve: Sequence[Line]

    def loss_at(self, seconds: float) -> float:
        """Validation loss after so much training, on the line between the two nearest points.

        A step takes the run's median time, whatever else the machine did meanwhile.
        """
        step_s = self.scores[self.trained_at]["train_step_ms"] / 1000
        before = self.curve[0]
        for line in self.curve:
            if line["step"] * step_s >= seconds and line is not before:
                share = (seconds / step_s - before["step"]) / (line["step"] - before["step"])
                return before["loss"] + share * (line["loss"] - before["loss"])
            before = line
        return before["loss"]

    @property
    def seconds(self) -> float:
        """Of all of its training, at the median time of a step."""
        return self.curve[-1]["step"] * self.scores[self.trained_at]["train_step_ms"] / 1000


class MissingError(Exception):
    """A claim's runs or files are not there: its message says which."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was run and measured.

    Attributes:
        runs: of the study, by name and seed.
        files: the lines of result files, by path.
    """

    runs: Mapping[str, Mapping[int, Run]]
    files: Mapping[str, Sequence[Line]]

    def together(self, *names: str) -> list[tuple[Run, ...]]:
        """Runs of the study beside each other, for each seed that all of them have.

        Raises:
            MissingError: there is none.
        """
        by_seed = [self.runs.get(name, {}) for name in names]
        seeds = set.intersection(*(set(runs) for runs in by_seed))
        if not seeds:
            missing = next((name for name, runs in zip(names, by_seed, strict=True) if not runs), names[-1])
            raise MissingError(f"no finished run of {missing}, or none of the same seed")
        return [tuple(runs[seed] for runs in by_seed) for seed in sorted(seeds)]

    def line(self, path: str, **wanted: object) -> Line:
        """The newest of `lines`."""
        return self.lines(path, **wanted)[-1]

    def lines(self, path: str, **wanted: object) -> list[Line]:
        """The lines of a file that have these values.

        Raises:
            MissingError: there is none.
        """
        found = [line for line in self.files.get(path, ()) if wanted.items() <= line.items()]
        if not found:
            raise MissingError(f"{path} has no line with {', '.join(f'{key} {x}' for key, x in wanted.items())}")
        return found


Judge = Callable[[Evidence], Verdict]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of a paper or of its readers.

    Attributes:
        text: the claim.
        source: who made it.
        judge: gives the verdict.
        command: that makes its evidence.
    """

    text: str
    source: str
    judge: Judge
    command: str

    def verdict(self, evidence: Evidence) -> Verdict:
        """What the evidence says, or that it is missing."""
        try:
            return self.judge(evidence)
        except MissingError as missing:
            return Verdict(NOT_RUN, str(missing))


def better(first: str, second: str, *, most: float = 1.0, length: int | None = None) -> Judge:
    """The first run's perplexity is below `most` times the second's, with every seed.

    Args:
        first: name of a run.
        second: name of another.
        most: 1: better; ALIKE: no worse.
        length: of the rows that are scored; None: as in training.
    """

    def judge(evidence: Evidence) -> Verdict:
        ratios = []
        for runs in evidence.together(first, second):
            one, other = (_loss(run, length) for run in runs)
            ratios.append(math.exp(one - other))
        at = f" on rows of {length}" if length else ""
        return Verdict(_decided([ratio < most for ratio in ratios]), _told(first, second, ratios, at))

    return judge


def alike(first: str, second: str) -> Judge:
    """Neither run's perplexity is ALIKE times the other's or more, with any seed."""

    def judge(evidence: Evidence) -> Verdict:
        ratios = [math.exp(_loss(one) - _loss(other)) for one, other in evidence.together(first, second)]
        return Verdict(_decided([1 / ALIKE < ratio < ALIKE for ratio in ratios]), _told(first, second, ratios))

    return judge


def better_at_equal_time(first: str, second: str) -> Judge:
    """The first run's perplexity is no higher when both have trained as long as the shorter of them."""

    def judge(evidence: Evidence) -> Verdict:
        ratios = []
        for one, other in evidence.together(first, second):
            seconds = min(one.seconds, other.seconds)
            ratios.append(math.exp(one.loss_at(seconds) - other.loss_at(seconds)))
        return Verdict(_decided([ratio <= 1 for ratio in ratios]), _told(first, second, ratios, " after the same time"))

    return judge


def loses_more(of: tuple[str, str], than: tuple[str, str]) -> Judge:
    """From the first to the second run of `of` perplexity grows by a larger factor than with those of `than`."""

    def judge(evidence: Evidence) -> Verdict:
        runs = evidence.together(*of, *than)
        growth = lambda before, after: math.exp(_loss(after) - _loss(before))
        factors = [growth(a, b) for a, b, _, _ in runs], [growth(c, d) for _, _, c, d in runs]
        return Verdict(
            _decided([one > other for one, other in zip(*factors, strict=True)]),
            "; ".join(_told(names[1], names[0], each) for names, each in zip((of, than), factors, strict=True)),
        )

    return judge


def all_of(*judges: Judge) -> Judge:
    """A claim of several parts: reproduced when all are, contradicted when one is."""

    def judge(evidence: Evidence) -> Verdict:
        verdicts = [part(evidence) for part in judges]
        words = {verdict.word for verdict in verdicts}
        word = next((word for word in (CONTRADICTED, UNDECIDED) if word in words), REPRODUCED)
        return Verdict(word, "; ".join(verdict.figure for verdict in verdicts))

    return judge


def measured(holds: Callable[[Evidence], tuple[bool, str]]) -> Judge:
    """A claim about measured figures: `holds` tells whether, and the figure."""

    def judge(evidence: Evidence) -> Verdict:
        held, figure = holds(evidence)
        return Verdict(REPRODUCED if held else CONTRADICTED, figure)

    return judge


def untestable(why: str) -> Judge:
    """A claim about what cannot be run at this scale."""
    return lambda evidence: Verdict(NOT_TESTABLE, why)


def _loss(run: Run, length: int | None = None) -> float:
    length = length or run.trained_at
    if length not in run.scores:
        raise MissingError(f"not scored on rows of {length}")
    return run.scores[length]["loss"]


def _decided(held: Sequence[bool]) -> str:
    """Of what held with each seed; a single one has no spread, and so decides nothing."""
    if len(held) < 2:
        return UNDECIDED
    if all(held):
        return REPRODUCED
    return UNDECIDED if any(held) else CONTRADICTED


def _told(first: str, second: str, ratios: Sequence[float], more: str = "") -> str:
    middle = statistics.geometric_mean(ratios)
    spread = f"{min(ratios):.3f}–{max(ratios):.3f}, {len(ratios)} seeds" if len(ratios) > 1 else "1 seed"
    return f"perplexity of {first} {middle:.3f} times that of {second}{more} ({spread})"
