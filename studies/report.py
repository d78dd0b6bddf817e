"""What the lines of the studies say: tables, verdicts and pictures, the page of claims, and README's sentences."""

import pathlib
from collections.abc import Sequence

from flash_lm.analysis.figure import can_draw
from flash_lm.analysis.hypotheses import RULE, verdict_table
from flash_lm.analysis.study import plot_study, study_tables, summary, write_study
from flash_lm.analysis.table import Columns, markdown_table
from flash_lm.configs.tables import study
from flash_lm.jsonl import Line, read_lines, write_jsonl
from studies.controls import design
from studies.controls.hypotheses import HYPOTHESES, anchor_verdict, recall_verdicts
from studies.controls.language import Candidate, best_rate, chosen, losses_of

TITLE = "The controls of the study: each model at the best of its rates at the whole budget"
_RATES: Columns = {
    "part": ("part", "{}"),
    "model": ("run", "{}"),
    "rate": ("rate", "{:g}"),
    "loss, validation split": ("loss", "{:.4f}"),
    "best": ("best", "{}"),
}


def write_report(results: pathlib.Path) -> str:
    """Writes all that follows from the lines, and returns the controls' table.md.

    Args:
        results: gets controls/ and study/ with table.md, summary.jsonl, verdicts.jsonl and pictures.
    """
    write_study(study.TITLE, study.get_hypotheses(), results / "study")
    return write_controls(results)


def write_controls(results: pathlib.Path) -> str:
    """Writes the tables and pictures of the controls, and returns table.md."""
    out, lines = results / design.NAME, design.lines_of(results)
    times = read_lines(out / "step_times.jsonl")
    groups = design.groups()
    counted = [line for part, candidates in groups for line in chosen(lines, part.name, candidates)]
    verdicts = [_with_ends(hypothesis.judge(counted, times), lines, groups) for hypothesis in HYPOTHESES]
    verdicts += [*recall_verdicts(lines), anchor_verdict(lines)]
    rates = [line for part, candidates in groups for x in candidates for line in _rates(lines, part.name, x)]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "verdicts.jsonl", verdicts)
    write_jsonl(out / "rates.jsonl", rates)
    of_seeds = summary(counted, times)
    write_jsonl(out / "summary.jsonl", of_seeds)
    parts = [TITLE, verdict_table(RULE, verdicts), study_tables(of_seeds), markdown_table(rates, _RATES)]
    text = "\n\n".join(part for part in parts if part)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_study(of_seeds, out)
    return text
