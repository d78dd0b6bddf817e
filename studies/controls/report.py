"""Report of the controls: tables, verdicts and pictures, from result lines."""

import pathlib
from collections.abc import Sequence

from flash_lm.report.figure import can_draw
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line, read_lines, write_jsonl
from studies.controls import design
from studies.controls.hypotheses import HYPOTHESES, anchor_verdict, recall_verdicts
from studies.controls.language import candidate_rates, find_best_rate, lines_at_best_rates, losses_by_rate
from studies.protocol.hypotheses import Hypothesis
from studies.protocol.verdict import BY_INTERVAL, verdict_table
from studies.quality.report import plot_study, study_tables, summarize

TITLE = "The controls of the study: each model at the best of its rates at the full budget"
_RATES: Columns = {
    "part": ("part", "{}"),
    "model": ("run", "{}"),
    "rate": ("rate", "{:g}"),
    "loss, validation split": ("loss", "{:.4f}"),
    "": ("what", "{}"),
}


def write_controls(out: pathlib.Path, quality: pathlib.Path) -> str:
    """Writes the tables and pictures of the controls, and returns table.md.

    Args:
        out: folder of the results of the controls.
        quality: folder of the results of the quality study; some of its runs count here, too.
    """
    lines, times = design.read_counted_lines(out, quality), read_lines(out / "step_times.jsonl")
    groups = design.groups(lines)
    counted = [line for group in groups for line in lines_at_best_rates(lines, group.part.name, group.candidates)]
    rates = [line for group in groups for line in _rates(lines, group)]
    verdicts = [
        _name_extreme_rates(hypothesis, hypothesis.verdict_line(counted, times), rates) for hypothesis in HYPOTHESES
    ]
    verdicts += [*recall_verdicts(lines), anchor_verdict(lines)]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "verdicts.jsonl", verdicts)
    write_jsonl(out / "rates.jsonl", rates)
    summaries = summarize(counted, times)
    write_jsonl(out / "summary.jsonl", summaries)
    parts = [TITLE, verdict_table(BY_INTERVAL, verdicts), study_tables(summaries), markdown_table(rates, _RATES)]
    text = "\n\n".join(part for part in parts if part)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_study(summaries, out)
    return text


def _rates(lines: Sequence[Line], group: design.Group) -> list[Line]:
    """Returns a line per rate that was tried; `what` marks the best, and whether it is the lowest or highest."""
    rate_lines = []
    for candidate in group.candidates:
        best = find_best_rate(lines, group.part.name, candidate)
        rates = candidate_rates(lines, group.part.name, candidate)
        extremes = {min(rates): "best, the lowest", max(rates): "best, the highest"}
        for rate, loss in sorted(losses_by_rate(lines, group.part.name, candidate).items()):
            line = {"part": group.part.name, "run": candidate.name, "rate": rate, "loss": loss}
            rate_lines.append(line | ({"what": extremes.get(rate, "best")} if rate == best else {}))
    return rate_lines


def _name_extreme_rates(hypothesis: Hypothesis, verdict: Line, rates: Sequence[Line]) -> Line:
    """Returns the verdict's line; its figure names models whose best rate is the lowest or highest tried."""
    compares = lambda line: line["part"] == hypothesis.part and line["run"] in (hypothesis.first, hypothesis.second)
    extremes = [
        f"{line['run']} is {line['what']} of its rates, {line['rate']:g}"
        for line in rates
        if compares(line) and "," in line.get("what", "")
    ]
    return verdict | {"figure": "; ".join([verdict["figure"], *extremes])} if verdict["figure"] else verdict
