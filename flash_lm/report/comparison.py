"""Compares finished runs: a table of their results, the best first, and curves against steps and time."""

import itertools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from flash_lm.report.curves import plot_curves
from flash_lm.report.markdown import LABELLED, RUNS, markdown_table
from flash_lm.report.results import Run, labels, newest_results, validation_curve
from flash_lm.runs.jsonl import Line, write_jsonl

Group = tuple[str, str, int]  # text, task, length
SOLVED = 0.99  # accuracy


def write_comparison(runs: Sequence[Run], split: str, out: pathlib.Path) -> str | None:
    """Writes table.md and curves.png with their figures, results.jsonl and validation.jsonl.

    A table has only results of the same text, task and row length, the best first. Runs on examples with an accuracy
    also get accuracy.png, and the table gives the step from which a run gets nearly all examples right. Where runs were
    trained as one program (`sweep --vmap`), table and title say so: their times are those of all of them.

    Args:
        runs: the runs' names; runs that have not been evaluated are left out.
        split: the split of the tables.
        out: folder of the files; created if necessary.

    Returns:
        The tables, each below its title; None, and nothing is written, if no run has results on the split.
    """
    results = newest_results(runs, split)
    if not results:
        return None
    group = _groups(results)
    # Results of one text, task and length form a table, the best first.
    results.sort(key=lambda line: (group(line), _rank(line)))
    names = labels(runs)
    for line in results:
        if (step := _solved_at(names[line["run"]].workdir, line)) is not None:
            line["solved_at"] = step
    optional = {f"{SOLVED:.0%} from step": ("solved_at", "{:,}"), "runs at once": ("vmapped_runs", "{:,}")}
    more = {heading: x for heading, x in optional.items() if any(x[0] in line for line in results)}
    groups = {key: list(lines) for key, lines in itertools.groupby(results, group)}
    columns = lambda lines: {**(LABELLED if _has_label_scores(lines[0]) else RUNS), **more}
    text = "\n\n".join(
        f"{_title(key)}, {split} split\n\n{markdown_table(lines, columns(lines))}" for key, lines in groups.items()
    )
    # Write the tables and the figures of the curves.
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    write_jsonl(out / "results.jsonl", results)
    at_once = ["seconds of several runs at once"] if any("vmapped_runs" in line for line in results) else []
    write_curves(runs, results, out, "; ".join([*map(_title, groups), *at_once]))
    return text


def write_curves(
    runs: Sequence[Run],
    results: list[Line],
    out: pathlib.Path,
    title: str,
    step_s: Mapping[str, float] | None = None,
) -> None:
    """Writes curves.png, for examples also accuracy.png, and their figures, validation.jsonl, into a folder.

    Args:
        runs: the runs' names.
        results: results of the runs to draw, from `newest_results`.
        out: folder of the files, which exists.
        title: the plot's title.
        step_s: seconds per step of each run, measured side by side, for the time axis; None: the actual times.
    """
    scored = {line["run"]: line for line in results}
    folders = {label: name.workdir for label, name in labels(runs).items() if label in scored}
    curves = {label: curve for label, workdir in folders.items() if (curve := validation_curve(workdir))}
    # With rates that were timed side by side, steps are put on one time axis.
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
    else:
        (out / "accuracy.png").unlink(missing_ok=True)  # of an earlier comparison


def _groups(results: list[Line]) -> Callable[[Line], Group]:
    """A function that returns what results must share to be ranked: text, task and row length.

    Texts with the same name are distinguished by their hashes.
    """
    # The hash is part of a text's name only where two texts share one.
    hashes = {(line["corpus"], line["corpus_hash"]) for line in results}
    counts = Counter(corpus for corpus, _ in hashes)

    def group(line: Line) -> Group:
        several = counts[line["corpus"]] > 1
        text = f"{line['corpus']} {line['corpus_hash']}" if several else line["corpus"]
        return text, line.get("task", "causal_lm"), line["length"]

    return group


def _title(group: Group) -> str:
    text, task, length = group
    return f"{text}, {task}, sequence length {length}"


def _rank(result: Line) -> float:
    """The rank of a result: smaller is better."""
    return -result["accuracy"] if _has_label_scores(result) else result["bits_per_byte"]


def _has_label_scores(result: Line) -> bool:
    return "majority" in result


def _on_examples(result: Line) -> bool:
    """Whether the result is on labels or examples and has their accuracy; the accuracy on text is not shown."""
    return _has_label_scores(result) or (result.get("pack") == "examples" and "accuracy" in result)


def _solved_at(workdir: pathlib.Path, result: Line) -> int | None:
    """The first step from which a run on examples got nearly all of them right."""
    if not _on_examples(result):
        return None
    # The step after the last one below the bound, so that a curve that falls again does not count.
    curve = validation_curve(workdir)
    last_below = max((line["step"] for line in curve if line["accuracy"] < SOLVED), default=0)
    return min((line["step"] for line in curve if line["step"] > last_below), default=None)
