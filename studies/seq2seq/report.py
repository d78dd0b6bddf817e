"""Report of the study of prefixes and encoders: a table, a picture, and verdicts seed by seed."""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from flash_lm.report.figure import new_figure, style
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.rates import lines_at_best_rate
from studies.protocol.verdict import DIFFERENCE, Rule, Verdict, judge_seeds

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


def selection_loss(line: Line) -> float:
    """Returns the validation loss of a run; a failed run is the worst."""
    return line.get("validation_loss", float("inf"))


def summarize(runs: Sequence[Line]) -> list[Line]:
    """Returns a line per model, at its best rate: medians over the seeds, and the lowest and highest perplexity."""
    summaries = []
    for model in dict.fromkeys(line["model"] for line in runs):
        chosen_lines = lines_at_best_rate(runs, {"model": model}, selection_loss)
        good = [line for line in chosen_lines if "failed" not in line]
        line = {
            "model": model,
            "rate": chosen_lines[0]["rate"],
            "seeds": len(good),
            "failed": len(chosen_lines) - len(good),
        }
        if good:
            medians = {key: statistics.median(x[key] for x in good) for key in ("perplexity", "accuracy", "step")}
            extremes = {name: of(x["perplexity"] for x in good) for name, of in (("lowest", min), ("highest", max))}
            line |= medians | extremes | {key: good[0][key] for key in ("parameters", "task")}
        summaries.append(line)
    return summaries


def seq2seq_table(lines: Sequence[Line]) -> str:
    """Returns a Markdown table, in the order of the study."""
    return markdown_table(list(lines), _MODELS)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A hypothesis: one model is better than another by a margin, or no worse within it, with every seed.

    Attributes:
        number: number of the hypothesis in the design of the study.
        measure: "perplexity", compared as a share, or "accuracy", in points.
        first: name of the first model.
        relation: "better" or "no worse".
        second: name of the second model.
        margin: a share of perplexity, or a difference of accuracy.
    """

    number: int
    measure: str
    first: str
    relation: str
    second: str
    margin: float

    @property
    def text(self) -> str:
        """The hypothesis in words, with its threshold."""
        percent = 100 * self.margin
        points = f" point{'s' * (percent != 1)} of accuracy"
        size = f"{percent:g}{'%' if self.measure == 'perplexity' else points}"
        how = f"at least {size} better" if self._is_better else f"at most {size} worse"
        return f"{self.first} is {how} than {self.second}"

    @property
    def rule(self) -> Rule:
        """The rule on the gain of the first model: difference of accuracies, or one minus the ratio of perplexities."""
        return Rule(self.relation, self.margin, DIFFERENCE)

    def judge(self, runs: Sequence[Line]) -> Verdict:
        """Judges the seeds that both models have at their best rates; the verdict's numbers are `gains` by seed."""
        ours, theirs = (_runs_by_seed(runs, name) for name in (self.first, self.second))
        gain_by_seed = {seed: self._gain(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}
        gains = {seed: gain for seed, gain in gain_by_seed.items() if not isinstance(gain, str)}
        reasons = [gain for gain in gain_by_seed.values() if isinstance(gain, str)]
        figure = [", ".join(f"{100 * gain:+.1f} %" for gain in gains.values())] if gains else []
        word = judge_seeds([self.rule.holds(gain) for gain in gains.values()], bool(reasons))
        return Verdict(word, "; ".join([*figure, *dict.fromkeys(reasons)]), numbers={"gains": gains})

    def verdict_line(self, runs: Sequence[Line]) -> Line:
        """Returns the line of the verdict, see `judge`."""
        return self.judge(runs).line(number=self.number, hypothesis=self.text)

    def _gain(self, ours: Line, theirs: Line) -> float | str:
        """Returns the gain of one seed, or why it has none: a run failed, or accuracies near 100 % leave no room."""
        if "failed" in ours or "failed" in theirs:
            return "a run failed"
        if self.measure == "perplexity":
            return 1 - ours["perplexity"] / theirs["perplexity"]
        compared = theirs["accuracy"] if self._is_better else min(ours["accuracy"], theirs["accuracy"])
        if compared > 1 - self.margin:
            return "accuracies leave no room"
        return ours["accuracy"] - theirs["accuracy"]

    @property
    def _is_better(self) -> bool:
        return self.relation == "better"


def _runs_by_seed(runs: Sequence[Line], model: str) -> dict[int, Line]:
    return {line["seed"]: line for line in lines_at_best_rate(runs, {"model": model}, selection_loss)}


def plot_seq2seq(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Plots a row per model: the perplexity of its seeds and, where runs end early, their steps."""
    lines = [line for line in lines if "perplexity" in line]
    panels = ["perplexity"] + ["step"] * (len({line["step"] for line in lines}) > 1)
    labels = {
        "perplexity": "perplexity per token (median, lowest, highest seed)",
        "step": "steps (median of the seeds)",
    }
    with new_figure(path, 1, len(panels), (6, 0.3 * len(lines) + 1.5), sharey=True) as (_, grid):
        for axes, key in zip(grid.flat, panels, strict=True):
            for i, task in enumerate(dict.fromkeys(line["task"] for line in lines)):
                task_lines = [line for line in lines if line["task"] == task]
                x, y = [line[key] for line in task_lines], [lines.index(line) for line in task_lines]
                ends = ("lowest", "highest") if key == "perplexity" else (key, key)
                spread = [[abs(line[end] - line[key]) for line in task_lines] for end in ends]
                axes.errorbar(x, y, xerr=spread, label=task, capsize=3, **style(i) | {"linestyle": "none"})
            axes.set(xlabel=labels[key])
        grid.flat[0].set_yticks(range(len(lines)), [line["model"] for line in lines])
        grid.flat[0].invert_yaxis()
        grid.flat[0].legend(fontsize=7)
