"""What the runs of a study of prefixes and encoders say together: a table, a picture, and verdicts seed by seed."""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from flash_lm.analysis.figure import drawing, style
from flash_lm.analysis.hypotheses import decided_by_seeds
from flash_lm.analysis.table import Columns, markdown_table
from flash_lm.jsonl import Line

_MODELS: Columns = {
    "model": ("model", "{}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "lowest": ("lowest", "{:.3f}"),
    "highest": ("highest", "{:.3f}"),
    "accuracy": ("accuracy", "{:.1%}"),
    "steps": ("step", "{:,.0f}"),
    "rate": ("rate", "{:g}"),
    "seeds": ("seeds", "{}"),
    "failed": ("failed", "{}"),
    "parameters": ("parameters", "{:,}"),
}


def best(lines: list[Line]) -> Line:
    """The run with the lowest loss on the validation split; the first of equals. Failed runs are the worst."""
    return min(lines, key=lambda line: line.get("validation_loss", float("inf")))


def at_best_rate(runs: Sequence[Line], model: str) -> dict[int, Line]:
    """A model's runs by seed, failed ones included, at the rate that was best with seed 0."""
    here = [line for line in runs if line["model"] == model]
    rate = best([line for line in here if line["seed"] == 0])["rate"] if here else None
    return {line["seed"]: line for line in here if line["rate"] == rate}


def summary(runs: Sequence[Line]) -> list[Line]:
    """One line a model, at its best rate: medians over the seeds, and the lowest and the highest perplexity."""
    found = []
    for model in dict.fromkeys(line["model"] for line in runs):
        here = list(at_best_rate(runs, model).values())
        good = [line for line in here if "failed" not in line]
        line = {"model": model, "rate": here[0]["rate"], "seeds": len(good), "failed": len(here) - len(good)}
        if good:
            medians = {key: statistics.median(x[key] for x in good) for key in ("perplexity", "accuracy", "step")}
            ends = {name: of(x["perplexity"] for x in good) for name, of in (("lowest", min), ("highest", max))}
            line |= medians | ends | {key: good[0][key] for key in ("parameters", "task")}
        found.append(line)
    return found


def seq2seq_table(lines: Sequence[Line]) -> str:
    """Markdown, in the order of the study."""
    return markdown_table(list(lines), _MODELS)


@dataclasses.dataclass(frozen=True)
class Rule:
    """That one model is better than another by a margin, or, if the margin is negative, at most that much worse.

    Attributes:
        number: of the hypothesis in the design of the study.
        measure: "perplexity", compared as a share, or "accuracy", in points.
        first: the model.
        second: the other model.
        margin: least gain of the first.
    """

    number: int
    measure: str
    first: str
    second: str
    margin: float

    @property
    def text(self) -> str:
        """In words, with its threshold."""
        unit = "%" if self.measure == "perplexity" else " points of accuracy"
        size = f"{100 * abs(self.margin):g}{unit}"
        how = f"at least {size} better" if self.margin > 0 else f"at most {size} worse"
        return f"{self.first} is {how} than {self.second}"

    def judge(self, runs: Sequence[Line]) -> Line:
        """The verdict, by the seeds that both models have at their best rates.

        Returns:
            A line with number, hypothesis, verdict, figure and `gains` by seed.
        """
        ours, theirs = (at_best_rate(runs, name) for name in (self.first, self.second))
        gains, lost = {}, False
        for seed in sorted(ours.keys() & theirs.keys()):
            gain = self._gain(ours[seed], theirs[seed])
            lost |= gain is None
            gains |= {} if gain is None else {seed: gain}
        verdict = decided_by_seeds([gain >= self.margin for gain in gains.values()], lost)
        figure = ", ".join(f"{100 * gain:+.1f}" for gain in gains.values()) or "none"
        return {
            "number": self.number,
            "hypothesis": self.text,
            "verdict": verdict,
            "figure": f"{figure} %",
            "gains": gains,
        }

    def _gain(self, ours: Line, theirs: Line) -> float | None:
        """Of one seed; None: a run failed, or accuracies leave no room: the other's, or both if it may be better."""
        if "failed" in ours or "failed" in theirs:
            return None
        if self.measure == "perplexity":
            return 1 - ours["perplexity"] / theirs["perplexity"]
        compared = theirs["accuracy"] if self.margin > 0 else min(ours["accuracy"], theirs["accuracy"])
        if compared > 1 - abs(self.margin):
            return None
        return ours["accuracy"] - theirs["accuracy"]


def plot_seq2seq(lines: Sequence[Line], path: pathlib.Path) -> None:
    """A bar a model: the median perplexity of its seeds, with the lowest and the highest."""
    lines = [line for line in lines if "perplexity" in line]
    with drawing(path, 1, 1, (8, 0.4 * len(lines) + 1.5)) as (_, grid):
        axes, (low, y, high) = grid.flat[0], ([x[key] for x in lines] for key in ("lowest", "perplexity", "highest"))
        spread = [[b - a for a, b in zip(*ends, strict=True)] for ends in ((low, y), (y, high))]
        tasks = list(dict.fromkeys(line["task"] for line in lines))
        colour = [style(tasks.index(line["task"]))["color"] for line in lines]
        axes.barh([line["model"] for line in lines], y, xerr=spread, color=colour, capsize=3)
        axes.invert_yaxis()
        axes.set(xlabel="perplexity a token (median, lowest and highest of the seeds)")
        if min(y) > 0 and max(y) / min(y) > 20:
            axes.set_xscale("log")
