"""Report of the transfer study: a table, a picture, and verdicts, from result lines."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.runs.jsonl import Line, group_lines, read_lines, write_jsonl
from flash_lm.sweeps.jobs import PRETRAINING, read_job_lines
from studies.protocol.verdict import DIFFERENCE, FAILS, HOLDS, UNDECIDED, Rule, Verdict, judge_seeds

POINTS = 100.0  # percentage points per unit of a share
BASELINE = "baseline"  # arm of the baselines that are no language models
_NORMAL_95 = 1.959964  # 95 % of a normal distribution is within this many standard deviations
_SCORE = "accuracy"
_PRETRAINED: Columns = {
    "pretrained": ("family", "{}"),
    "on": ("pretraining", "{}"),
    "parameters": ("parameters", "{:,}"),
    "loss of masked tokens, nats": ("loss", "{:.3f}"),
    "failed": ("failed", "{}"),
}
_VERDICTS: Columns = {
    "hypothesis": ("hypothesis", "{}"),
    "labels": ("share", "{:.0%}"),
    "verdict": ("verdict", "{}"),
    "points by seed": ("figure", "{}"),
}


@dataclasses.dataclass(frozen=True)
class NoWorse:
    """A hypothesis: one family's accuracy is at most some points below another's, with the same arm, labels and seed.

    Attributes:
        arm: arm of both families.
        first: name of the first family.
        second: name of the second family.
        points: how many points lower the first may be.
        over: an arm whose accuracy is subtracted from that of `arm`, for each family. Then the gains of `arm` are
            compared, and the second family must gain something. None: accuracies are compared.
        pretraining: name of the corpus that both were pretrained on; None: no pretraining.
        nats: masked loss that both pretrained models must be below. A model above it uses no context, so its transfer
            says nothing about attention.
    """

    arm: str
    first: str
    second: str
    points: float
    over: str | None = None
    pretraining: str | None = None
    nats: float = math.inf

    def judge(self, lines: Sequence[Line], pretrained: Sequence[Line], share: float) -> Verdict:
        """Judges a share of the labels: three seeds must agree, by more than the error of the test texts.

        Args:
            lines: lines of `run_transfer`.
            pretrained: its lines of pretraining.
            share: share of the labels.
        """
        ours, theirs = (self._lines_by_seed(lines, family, share) for family in (self.first, self.second))
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        comparable = [pair for pair in pairs if _is_comparable([*pair[0], *pair[1]])]
        gaps = [_difference([*one, *other[::-1]]) for one, other in comparable]
        lost = len(pairs) - len(comparable)
        rule = Rule("no worse", self.points, DIFFERENCE)
        word = judge_seeds([rule.holds(gap.points, gap.error) for gap in gaps], bool(lost))
        figure = ", ".join(f"{gap.points:+.1f}" for gap in gaps)
        doubts = [f"± {max(gap.error for gap in gaps):.1f}"] if gaps else []
        doubts += [f"{lost} seeds failed or scored on other texts"] if lost else []
        if word in (HOLDS, FAILS) and (reasons := self._doubts(comparable, pretrained)):
            word, doubts = UNDECIDED, doubts + reasons
        figure += f" ({'; '.join(doubts)})" if doubts else ""
        return Verdict(word, figure.strip())

    def verdict_line(self, lines: Sequence[Line], pretrained: Sequence[Line], share: float) -> Line:
        """Returns the line of the verdict, see `judge`."""
        return self.judge(lines, pretrained, share).line(hypothesis=self._text, share=share)

    @property
    def _text(self) -> str:
        what = f"{self.arm} over {self.over}: the gain of {self.first}" if self.over else f"{self.arm}: {self.first}"
        return f"{what} at most {self.points:g} points below {self.second}"

    def _lines_by_seed(self, lines: Sequence[Line], family: str, share: float) -> dict[int, list[Line]]:
        """Returns the family's line of the arm, and of the subtracted arm if any, for seeds that have both."""
        by_arm_and_seed = {(x["arm"], x["seed"]): x for x in lines if (x["family"], x["share"]) == (family, share)}
        arms = [self.arm, *([self.over] if self.over else [])]
        seeds = {seed for arm, seed in by_arm_and_seed if arm == self.arm}
        return {
            seed: [by_arm_and_seed[arm, seed] for arm in arms]
            for seed in seeds
            if all((arm, seed) in by_arm_and_seed for arm in arms)
        }

    def _doubts(self, comparable: Sequence[tuple[list[Line], list[Line]]], pretrained: Sequence[Line]) -> list[str]:
        """Returns reasons against a verdict, although the seeds agree."""
        doubts, names = [], (self.first, self.second)
        losses = {line["family"]: line.get("loss") for line in pretrained if line["pretraining"] == self.pretraining}
        blind = [name for name in names if (losses.get(name) or math.inf) >= self.nats]
        if self.pretraining and blind:
            doubts.append(f"pretrained without learning to use context: {', '.join(blind)}")
        if guessing := [
            name
            for i, name in enumerate(names)
            if any(x[i][0]["accuracy_low"] <= x[i][0]["majority"] for x in comparable)
        ]:
            doubts.append(f"no better than the most frequent label: {', '.join(guessing)}")
        gains = [_difference(other) for _, other in comparable] if self.over else []
        if not all(Rule("better", 0.0, DIFFERENCE).holds(gain.points, gain.error) for gain in gains):
            doubts.append(f"{self.second} gains too little: {', '.join(f'{gain.points:+.1f}' for gain in gains)}")
        return doubts


class _Difference(NamedTuple):
    points: float
    error: float  # half of the 95 % interval, as if each accuracy had other test texts (so it is wide)


def _difference(lines: Sequence[Line]) -> _Difference:
    """Returns the alternating sum of accuracies, a - b + c - …, in points, with its error."""
    total = sum((-1) ** i * line[_SCORE] for i, line in enumerate(lines))
    variance = sum(line[_SCORE] * (1 - line[_SCORE]) / line["tokens"] for line in lines)
    return _Difference(POINTS * total, POINTS * _NORMAL_95 * math.sqrt(variance))


def _is_comparable(lines: Sequence[Line]) -> bool:
    """Returns whether no run failed and all were scored on the same texts."""
    same = len({tuple(line.get(key) for key in ("corpus_hash", "split", "tokens")) for line in lines}) == 1
    return same and not any("failed" in line for line in lines)


def summarize(lines: Sequence[Line]) -> list[Line]:
    """Returns a line per family, arm and share of the labels, over the seeds.

    Args:
        lines: lines of `run_transfer`.

    Returns:
        Lines with the mean `accuracy`, `lowest`, `highest`, the means of `macro_f1` and `matthews`, `rate`, `seeds` and
        `failed`; without scores if all seeds failed.
    """
    summaries = []
    for (family, arm, share), group in group_lines(lines, "family", "arm", "share").items():
        scored = [line for line in group if "failed" not in line]
        line = {"family": family, "arm": arm, "share": share}
        line |= {"rate": group[0]["rate"]} if "rate" in group[0] else {}
        line |= {"seeds": len(scored), "failed": len(group) - len(scored)}
        if scored:
            values = [x[_SCORE] for x in scored]
            line |= {"lowest": min(values), "highest": max(values)}
            line |= {key: statistics.fmean(x[key] for x in scored) for key in (_SCORE, "macro_f1", "matthews")}
        summaries.append(line)
    return sorted(summaries, key=lambda line: (line["arm"], line["family"], line["share"]))


def write_transfer(title: str, hypotheses: Sequence[NoWorse], shares: Sequence[float], out: pathlib.Path) -> str:
    """Writes the report of the lines of runs, pretraining and baselines.jsonl in OUT; returns table.md.

    The other files are summary.jsonl, verdicts.jsonl and accuracy.png.

    Raises:
        InputError: no run has finished.
    """
    lines, file = read_job_lines(out), out / "baselines.jsonl"
    if not lines:
        raise InputError(f"{out} has no finished run: make some with python -m studies.transfer run")
    summaries, baselines = summarize(lines), read_lines(file)
    pretrained = read_job_lines(out, PRETRAINING)
    verdicts = [one.verdict_line(lines, pretrained, share) for one in hypotheses for share in shares]
    write_jsonl(out / "summary.jsonl", summaries)
    write_jsonl(out / "verdicts.jsonl", verdicts)
    tables = [markdown_table(verdicts, _VERDICTS), transfer_table([*summaries, *baselines])]
    tables += [markdown_table(pretrained, _PRETRAINED)] if pretrained else []
    text = "\n\n".join([title, *tables])
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        _plot(summaries, baselines, out / "accuracy.png", title)
    return text


def transfer_table(lines: Sequence[Line]) -> str:
    """Returns a Markdown table of the accuracy of each arm and family, with a column per share of the labels.

    Args:
        lines: lines of `summarize`, and baselines: with family, arm, share and accuracy.
    """
    rows: dict[tuple[str, str], Line] = {}
    shares = sorted({line["share"] for line in lines})
    for line in lines:
        row = rows.setdefault((line["arm"], line["family"]), {"arm": line["arm"], "family": line["family"]})
        row[str(line["share"])] = _cell(line)
        row |= {"rate": f"{line['rate']:g}"} if "rate" in line else {}
    scores = {f"{share:.0%} of the labels": (str(share), "{}") for share in shares}
    columns: Columns = {"arm": ("arm", "{}"), "family": ("family", "{}"), **scores, "rate": ("rate", "{}")}
    return markdown_table([*rows.values()], columns)


def _cell(line: Line) -> str:
    if _SCORE not in line:
        return f"{line['failed']} seeds failed"
    spread = f" ({line['lowest']:.1%}–{line['highest']:.1%})" if line.get("seeds", 1) > 1 else ""
    lost = f", {line['failed']} failed" if line.get("failed") else ""
    return f"{line[_SCORE]:.1%}{spread}{lost}"


def _plot(lines: Sequence[Line], baselines: Sequence[Line], path: pathlib.Path, title: str) -> None:
    """Plots a panel per arm, in two rows if their number is even; every panel has the baselines."""
    drawn = [line | {"labels": POINTS * line["share"]} for line in (*lines, *baselines) if _SCORE in line]
    panels = [
        Panel(
            [line for line in drawn if line["arm"] in (arm, BASELINE)],
            "labels",
            "% of the labels",
            _SCORE,
            "test accuracy, %",
            unit=POINTS,
            title=arm,
            band=("lowest", "highest"),
        )
        for arm in dict.fromkeys(line["arm"] for line in drawn)
        if arm != BASELINE
    ]
    half = len(panels) if len(panels) % 2 else len(panels) // 2
    plot_panels([panels[:half], panels[half:]] if half < len(panels) else [panels], path, curve="family", title=title)
