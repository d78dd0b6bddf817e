"""What the lines of a study of transfer say together: a table, a picture, and verdicts."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Sequence

from flash_lm.analysis.figure import can_draw
from flash_lm.analysis.hypotheses import FAILS, HOLDS, UNDECIDED, decided_by_seeds
from flash_lm.analysis.panels import Panel, plot_panels
from flash_lm.analysis.table import Columns, markdown_table
from flash_lm.errors import InputError
from flash_lm.jsonl import Line, grouped, read_lines, write_jsonl
from flash_lm.shared_work import made_lines

POINTS = 100.0  # of a share
BASELINE = "baseline"  # the arm of what is no model of ours
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
    """That one family's accuracy is at most some points below another's, with the same arm, labels and seed.

    Attributes:
        arm: of both.
        first: the family.
        second: the other family.
        points: how much lower it may be.
        pretraining: name of the corpus that both were pretrained on; None: of none.
        nats: the masked loss that both pretrained models must be below. From it on, a model uses no context, and
            what it transfers says nothing about attention.
    """

    arm: str
    first: str
    second: str
    points: float
    pretraining: str | None = None
    nats: float = math.inf

    def judge(self, lines: Sequence[Line], pretrained: Sequence[Line], share: float) -> Line:
        """The verdict with a share of the labels: it needs three seeds that agree, and models that use context.

        Args:
            lines: of `run_transfer`.
            pretrained: its lines of pretraining.
            share: of the labels.

        Returns:
            A line with hypothesis, share, verdict and figure.
        """
        found: dict[int, dict[str, Line]] = {}
        for line in lines:
            if (line["arm"], line["share"]) == (self.arm, share):
                found.setdefault(line["seed"], {})[line["family"]] = line
        pairs = [(own[self.first], own[self.second]) for own in found.values() if {self.first, self.second} <= {*own}]
        whole = [pair for pair in pairs if not any("failed" in line for line in pair) and _same_texts(*pair)]
        # Rounded: two of a hundred texts are two points, and not a little more.
        points = [round(POINTS * (one[_SCORE] - other[_SCORE]), 9) for one, other in whole]
        verdict = decided_by_seeds([x >= -self.points for x in points], lost=len(whole) < len(pairs))
        figure = ", ".join(f"{x:+.1f}" for x in points)
        if len(whole) < len(pairs):
            figure += f" ({len(pairs) - len(whole)} seeds failed or scored on other texts)"
        if verdict in (HOLDS, FAILS) and (blind := self._without_context(pretrained)):
            verdict = UNDECIDED
            figure += f" (pretrained without learning to use context: {', '.join(blind)})"
        about = f"{self.arm}: {self.first} at most {self.points:g} points below {self.second}"
        return {"hypothesis": about, "share": share, "verdict": verdict, "figure": figure}

    def _without_context(self, pretrained: Sequence[Line]) -> list[str]:
        """Which of the two families learned too little in pretraining."""
        own = [line for line in pretrained if line["pretraining"] == self.pretraining]
        high = {line["family"] for line in own if line.get("loss", 0.0) >= self.nats}
        return [family for family in (self.first, self.second) if family in high]


def _same_texts(one: Line, other: Line) -> bool:
    return all(one.get(key) == other.get(key) for key in ("corpus_hash", "split", "tokens"))


def summary(lines: Sequence[Line]) -> list[Line]:
    """One line for each family, arm and share of the labels, over the seeds.

    Args:
        lines: of `run_transfer`.

    Returns:
        Lines with the mean `accuracy`, `lowest`, `highest`, the means of `macro_f1` and `matthews`, `rate`, `seeds` and
        `failed`; without scores if all seeds failed.
    """
    found = []
    for (family, arm, share), own in grouped(lines, "family", "arm", "share").items():
        scored = [line for line in own if "failed" not in line]
        line = {"family": family, "arm": arm, "share": share}
        line |= {"rate": own[0]["rate"]} if "rate" in own[0] else {}
        line |= {"seeds": len(scored), "failed": len(own) - len(scored)}
        if scored:
            values = [x[_SCORE] for x in scored]
            line |= {"lowest": min(values), "highest": max(values)}
            line |= {key: statistics.fmean(x[key] for x in scored) for key in (_SCORE, "macro_f1", "matthews")}
        found.append(line)
    return sorted(found, key=lambda line: (line["arm"], line["family"], line["share"]))


def write_transfer(title: str, hypotheses: Sequence[NoWorse], shares: Sequence[float], out: pathlib.Path) -> str:
    """Writes what the lines of OUT/runs, OUT/pretraining and OUT/baselines.jsonl say, and returns table.md.

    The other files are summary.jsonl, verdicts.jsonl and accuracy.png.

    Raises:
        InputError: no run has finished.
    """
    lines, file = made_lines(out / "runs"), out / "baselines.jsonl"
    if not lines:
        raise InputError(f"{out}/runs has no finished run: make some with scripts/transfer.py run")
    found, baselines = summary(lines), read_lines(file)
    pretrained = made_lines(out / "pretraining")
    verdicts = [one.judge(lines, pretrained, share) for one in hypotheses for share in shares]
    write_jsonl(out / "summary.jsonl", found)
    write_jsonl(out / "verdicts.jsonl", verdicts)
    tables = [markdown_table(verdicts, _VERDICTS), transfer_table([*found, *baselines])]
    tables += [markdown_table(pretrained, _PRETRAINED)] if pretrained else []
    text = "\n\n".join([title, *tables])
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        _plot(found, baselines, out / "accuracy.png", title)
    return text


def transfer_table(lines: Sequence[Line]) -> str:
    """Markdown: accuracy of each arm and family, a column for each share of the labels.

    Args:
        lines: of `summary`, and baselines: with family, arm, share and accuracy.
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
    """A panel for each arm; the baselines are in all of them."""
    drawn = [line | {"labels": POINTS * line["share"]} for line in (*lines, *baselines) if _SCORE in line]
    panels = [
        Panel(
            [line for line in drawn if line["arm"] in (arm, BASELINE)],
            "labels",
            "% of the labels",
            _SCORE,
            "% of the test texts whose label is right",
            unit=POINTS,
            title=arm,
            band=("lowest", "highest"),
        )
        for arm in dict.fromkeys(line["arm"] for line in drawn)
        if arm != BASELINE
    ]
    plot_panels([panels], path, curve="family", title=title)
