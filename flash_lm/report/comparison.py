"""Compares finished runs: a table of their results, the best first, and curves against steps and time."""

import itertools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from flash_lm.report.curves import Curve, plot_curves
from flash_lm.report.figure import FORMATS, SCREEN, Output, can_draw
from flash_lm.report.markdown import LABELLED, RUNS, markdown_table
from flash_lm.report.results import Run, labels, newest_results, validation_curve
from flash_lm.report.seeds import compare_seeds, group_seeds, seed_table
from flash_lm.runs.jsonl import Line, write_jsonl

Group = tuple[str, str, int]  # text, task, length
SOLVED = 0.99  # accuracy


def write_comparison(
    runs: Sequence[Run],
    split: str,
    out: pathlib.Path,
    *,
    step_s: Mapping[str, float] | None = None,
    flops: Mapping[str, float] | None = None,
    output: Output = SCREEN,
) -> str | None:
    """Writes table.md and the curves with their figures, results.jsonl and validation.jsonl.

    A table has only results of the same text, task and row length, the best first. Runs that differ only in their seed
    share a curve with a band, and a second table, seeds.jsonl, has their means, with intervals and verdicts. Runs on
    examples with an accuracy also get accuracy.png, and the table gives the step from which a run gets nearly all
    examples right. Where runs were trained as one program (`sweep --vmap`), table and title say so: their times are
    those of all of them.

    Args:
        runs: the runs' names; runs that have not been evaluated are left out.
        split: the split of the tables.
        out: folder of the files; created if necessary.
        step_s: see `write_curves`.
        flops: see `write_curves`.
        output: see `write_curves`.

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
        if step_s:
            line["step_ms"] = 1000 * step_s[line["run"]]
    optional = {
        f"{SOLVED:.0%} from step": ("solved_at", "{:,}"),
        "runs at once": ("vmapped_runs", "{:,}"),
        "ms per step, side by side": ("step_ms", "{:,.0f}"),
    }
    more = {heading: x for heading, x in optional.items() if any(x[0] in line for line in results)}
    groups = {key: list(lines) for key, lines in itertools.groupby(results, group)}
    columns = lambda lines: {**(LABELLED if _has_label_scores(lines[0]) else RUNS), **more}
    parts = [
        f"{_title(key)}, {split} split\n\n{markdown_table(lines, columns(lines))}" for key, lines in groups.items()
    ]
    # Write the tables and the figures of the curves.
    out.mkdir(parents=True, exist_ok=True)
    scored = {line["run"] for line in results}
    alike = group_seeds({label: name for label, name in names.items() if label in scored}, results)
    if len(groups) == 1 and not _on_examples(results[0]) and max(map(len, alike.values())) > 1:
        seeds = compare_seeds(results, alike)
        write_jsonl(out / "seeds.jsonl", seeds)
        parts.append(seed_table(seeds))
    text = "\n\n".join(parts)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    write_jsonl(out / "results.jsonl", results)
    at_once = ["seconds of several runs at once"] if any("vmapped_runs" in line for line in results) else []
    title = "; ".join([*map(_title, groups), *at_once])
    write_curves(runs, results, out, title, step_s=step_s, flops=flops, output=output)
    return text


def write_curves(
    runs: Sequence[Run],
    results: list[Line],
    out: pathlib.Path,
    title: str,
    *,
    step_s: Mapping[str, float] | None = None,
    flops: Mapping[str, float] | None = None,
    output: Output = SCREEN,
) -> None:
    """Writes curves.png, for examples also accuracy.png, and their figures, validation.jsonl, into a folder.

    Args:
        runs: the runs' names.
        results: results of the runs to draw, from `newest_results`.
        out: folder of the files, which exists.
        title: the plot's title.
        step_s: seconds per step of each run, measured side by side, for the time axis; None: the actual times.
        flops: FLOPs per step of each run, for an axis of them; None: there is none.
        output: formats and width of the figures.
    """
    scored = {line["run"]: line for line in results}
    names = {label: name for label, name in labels(runs).items() if label in scored}
    curves = {label: curve for label, name in names.items() if (curve := validation_curve(name.workdir))}
    # What each step took, by the rates that were timed side by side, and its FLOPs.
    per_step = {key: of_run for key, of_run in (("rated_seconds", step_s), ("flops", flops)) if of_run}
    curves = {
        label: [line | {key: line["step"] * of_run[label] for key, of_run in per_step.items()} for line in curve]
        for label, curve in curves.items()
    }
    write_jsonl(out / "validation.jsonl", [{"run": label, **line} for label, curve in curves.items() for line in curve])
    # Seeds of one model share a curve.
    groups = group_seeds({label: name for label, name in names.items() if label in curves}, results)
    drawn = {
        name: Curve([curves[label] for label in alike], [scored[label] for label in alike])
        for name, alike in groups.items()
    }
    if not can_draw():
        return
    axes = ("step", "rated_seconds" if step_s else "train_seconds", "flops")
    plot_curves(drawn, out / "curves.png", title, axes=axes, output=output)
    if all(_on_examples(line) for line in results):
        plot_curves(drawn, out / "accuracy.png", title, axes=axes, quality="accuracy", output=output)
    else:
        for kind in FORMATS:
            (out / f"accuracy.{kind}").unlink(missing_ok=True)  # of an earlier comparison


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
