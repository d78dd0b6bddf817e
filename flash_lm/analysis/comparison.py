"""Finished runs side by side: a table of their results, the best first, and quality against steps and time."""

import pathlib
from collections.abc import Mapping

from flash_lm.analysis.curves import plot_curves
from flash_lm.analysis.results import newest_results, validation_curve
from flash_lm.analysis.table import RUNS, markdown_table
from flash_lm.jsonl import Line, write_jsonl

SOLVED = 0.99  # accuracy


def write_comparison(workdirs: list[pathlib.Path], split: str, out: pathlib.Path) -> str | None:
    """Writes table.md and curves.png with their figures, results.jsonl and validation.jsonl.

    Runs on examples that have an accuracy get accuracy.png, too, and where one is right about nearly all of them, the
    table tells since when.

    Args:
        workdirs: of runs; those that have not been evaluated are left out.
        split: of the table.
        out: folder of the files; made if need be.

    Returns:
        The title and the table; None, and nothing is written, when no run has results on the split.
    """
    results = newest_results(workdirs, split)
    if not results:
        return None
    results.sort(key=lambda line: line["bits_per_byte"])
    for line in results:
        if (step := _solved_at(workdirs, line)) is not None:
            line["solved_at"] = step
    title = ", ".join(
        {line["corpus"]: None for line in results} | {line.get("task", "causal_lm"): None for line in results}
    )
    lengths = {line["length"] for line in results}
    title += f", rows of {lengths.pop()} tokens" if len(lengths) == 1 else ", rows of several lengths"
    solved = {f"{SOLVED:.0%} from step": ("solved_at", "{:,}")} if any("solved_at" in x for x in results) else {}
    text = f"{title}, {split} split\n\n{markdown_table(results, {**RUNS, **solved})}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    write_jsonl(out / "results.jsonl", results)
    write_curves(workdirs, results, out, title)
    return text


def write_curves(
    workdirs: list[pathlib.Path],
    results: list[Line],
    out: pathlib.Path,
    title: str,
    step_s: Mapping[str, float] | None = None,
) -> None:
    """Writes curves.png, of examples accuracy.png too, with their figures, validation.jsonl, into a folder.

    Args:
        workdirs: of runs.
        results: of those that are drawn.
        out: folder of the files, which is there.
        title: of the plot.
        step_s: seconds a step of each run, measured side by side, to be the axis of time; None: as long as they took.
    """
    scored = {line["run"]: line for line in results}
    curves = {path.name: curve for path in workdirs if path.name in scored and (curve := validation_curve(path))}
    if step_s:
        curves = {
            name: [line | {"rated_seconds": line["step"] * step_s[name]} for line in curve]
            for name, curve in curves.items()
        }
    lines = [{"run": name, **line} for name, curve in curves.items() for line in curve]
    write_jsonl(out / "validation.jsonl", lines)
    time = "rated_seconds" if step_s else "train_seconds"
    plot_curves(curves, scored, out / "curves.png", title, time)
    if all(_on_examples(line) for line in results):
        plot_curves(curves, scored, out / "accuracy.png", title, time, quality="accuracy")


def _on_examples(result: Line) -> bool:
    """Whether it tells which share of them was right; text has an accuracy that nobody asks for."""
    return result.get("pack") == "examples" and "accuracy" in result


def _solved_at(workdirs: list[pathlib.Path], result: Line) -> int | None:
    """The first step from which on a run on examples had nearly all of them right."""
    if not _on_examples(result):
        return None
    curve = next(validation_curve(path) for path in workdirs if path.name == result["run"])
    last_below = max((line["step"] for line in curve if line["accuracy"] < SOLVED), default=0)
    return min((line["step"] for line in curve if line["step"] > last_below), default=None)
