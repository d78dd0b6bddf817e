"""Report of the quality study: a Markdown table per part, verdicts and pictures, from result lines."""

import pathlib
import statistics
from collections.abc import Sequence

from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.report.tuning import write_tuning
from flash_lm.runs.jsonl import Line, group_lines, read_lines, write_jsonl
from flash_lm.sweeps.jobs import RATES, read_job_lines
from flash_lm.sweeps.tuning import best_values
from studies.protocol.hypotheses import Hypothesis, best_timings, step_name
from studies.protocol.verdict import BY_INTERVAL, verdict_table
from studies.quality.implementations import compare_implementations, implementations_table
from studies.quality.run import POSITIONS

_SAME = ("family", "parameters", "rate", "step", "trained_length", "corpus", "batch_tokens")  # same for all seeds
_MODEL = ("part", "run")
_KEYS = (*_MODEL, "share", "length", "slices", "slice")  # identify a line over the seeds
_FULL = "perplexity"  # heading of the score at the full budget
_ABOUT: Columns = {"model": ("run", "{}"), "parameters": ("parameters", "{:,}"), "rate": ("rate", "{:g}")}
_SPREAD: Columns = {
    "lowest": ("lowest", "{:.2f}"),
    "highest": ("highest", "{:.2f}"),
    "seeds": ("seeds", "{}"),
    "failed": ("failed", "{}"),
    "ms per step": ("step_ms", "{:.0f}"),
    "minutes": ("minutes", "{:.1f}"),
}


def write_study(title: str, hypotheses: Sequence[Hypothesis], out: pathlib.Path) -> str:
    """Writes the report of the lines of runs, rates and step_times.jsonl in OUT; returns table.md.

    The other files are summary.jsonl, verdicts.jsonl, the pictures, and the results of the rate search in tuning/.

    Raises:
        InputError: no run has finished.
    """
    file = out / "step_times.jsonl"
    runs, times, tuned = read_job_lines(out), read_lines(file), read_job_lines(out, RATES)
    if not runs:
        raise InputError(f"{out} has no finished run: make some with --workdir=FOLDER --corpus=DATA")
    lines, verdicts = summarize(runs, times), [x.verdict_line(runs, times) for x in hypotheses]
    write_jsonl(out / "summary.jsonl", lines)
    write_jsonl(out / "verdicts.jsonl", verdicts)
    parts = [title, verdict_table(BY_INTERVAL, verdicts), study_tables(lines)]
    if comparisons := compare_implementations(runs):
        parts.append(implementations_table(comparisons))
    if tuned:
        (out / "tuning").mkdir(exist_ok=True)
        parts.append(write_tuning(tuned, best_values(tuned), out / "tuning"))
    text = "\n\n".join(parts)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if can_draw():
        plot_study(lines, out)
    return text


def summarize(lines: Sequence[Line], times: Sequence[Line]) -> list[Line]:
    """Summarizes perplexity over the seeds: a line per part, model, share of the budget, sequence length and slice.

    Args:
        lines: lines of runs, see `trunk_job`.
        times: lines whose `run` is `step_name`, with microbatch_ms and model_flops.

    Returns:
        Lines with the geometric mean `perplexity`, `lowest`, `highest`, `seeds`, `failed`; step_ms, `minutes` and
        `flops` of the training, if the model's step was timed. A model whose seeds all failed has one line for its
        part, without scores.
    """
    step_of = best_timings(times)
    # Scores and failures, grouped over the seeds.
    scored = group_lines([line for line in lines if line.get("split") == "test"], *_KEYS)
    failed = group_lines([line for line in lines if "failed" in line], *_MODEL)
    summaries = []
    for key, seed_lines in scored.items():
        perplexities, first = [line["perplexity"] for line in seed_lines], seed_lines[0]
        line = {x: value for x, value in zip(_KEYS, key, strict=True) if value is not None} | {
            "perplexity": statistics.geometric_mean(perplexities),
            "lowest": min(perplexities),
            "highest": max(perplexities),
            "seeds": len(seed_lines),
            "failed": len(failed.get(key[:2], ())),
            **{x: first[x] for x in _SAME},
        }
        if step := step_of.get(step_name(first["part"], first["run"])):
            line |= {
                "step_ms": step["microbatch_ms"],
                "minutes": first["step"] * step["microbatch_ms"] / 60_000,
                "flops": first["step"] * step["model_flops"],
                **({"timed_on": step["device"]} if "device" in step else {}),
            }
        summaries.append(line)
    # Models whose seeds all failed have a line without scores.
    some = {key[:2] for key in scored}
    for key, seed_lines in failed.items():
        if key in some:
            continue
        summaries.append(
            dict(zip(_MODEL, key, strict=True)) | {"seeds": 0, "failed": len(seed_lines), "rate": seed_lines[0]["rate"]}
        )
    return summaries


def study_tables(lines: Sequence[Line]) -> str:
    """Returns a Markdown table of perplexities for each part, the best model first.

    Args:
        lines: lines of `summarize`.
    """
    return "\n\n".join(map(_table, group_lines(lines, "part").values()))


def _table(lines: Sequence[Line]) -> str:
    """Returns the table of one part."""
    rows: dict[str, Line] = {}
    # Models whose seeds all failed come last, without scores.
    lost = [line for line in lines if not line["seeds"]]
    tabled = [line for line in lines if line["seeds"] and line.get("slices") != POSITIONS]  # positions have a picture
    if not tabled:
        return f"{lost[0]['part']}: no run stayed finite\n\n{markdown_table(lost, {**_ABOUT, **_SPREAD})}"
    # One row per model, one column per length and slice.
    for line in tabled:
        row = rows.setdefault(line["run"], {})
        row[_heading(line)] = line["perplexity"]
        if _heading(line) == _FULL:
            row |= line
    headings = list(dict.fromkeys(map(_heading, sorted(tabled, key=_column_order))))
    split = headings.index(_FULL) + 1
    scores = lambda names: {name: (name, "{:.2f}") for name in names}
    columns: Columns = {**_ABOUT, **scores(headings[:split]), **_SPREAD, **scores(headings[split:])}
    ordered = [*sorted(rows.values(), key=lambda row: row[_FULL]), *lost]
    best = ordered[0]
    return (
        f"{best['part']}: sequences of {best['trained_length']} tokens, {best['step']:,} steps of "
        f"{best['batch_tokens']:,} tokens; test split of {best['corpus']}\n\n{markdown_table(ordered, columns)}"
    )


def _heading(line: Line) -> str:
    if "slice" in line:
        return line["slice"]
    if line["length"] != line["trained_length"]:
        return f"at length {line['length']}"
    return _FULL if line["share"] == 1 else f"at {line['share']:g} of the budget"


def _column_order(line: Line) -> tuple:
    """Sort key of a score's column: by budget, then other lengths, and slices last."""
    return line["share"], "slice" in line, line["length"] != line["trained_length"], line["length"]


def plot_study(lines: Sequence[Line], out: pathlib.Path) -> None:
    """Draws pictures of perplexity, with a row of panels per part; a model has the same style in all of them.

    They are curves.png (against time and FLOPs of training), quality.png (against time per step) and context.png
    (by position in the sequence).

    Args:
        lines: lines of `summarize`.
        out: folder of the pictures.
    """
    lines = [line for line in lines if line["seeds"]]
    trained = [line for line in lines if "slice" not in line and line["length"] == line["trained_length"]]
    # Curves need several budgets, quality.png a timed step, context.png slices by position.
    several = {
        part
        for (part,), part_lines in group_lines(trained, "part").items()
        if len({x["share"] for x in part_lines}) > 1
    }
    curves = [line for line in trained if "minutes" in line and line["part"] in several]
    timed = [line for line in trained if "step_ms" in line and line["share"] == 1]
    by_position = [line for line in lines if line.get("slices") == POSITIONS]
    longest = {
        key: max(line["length"] for line in part_lines) for key, part_lines in group_lines(by_position, *_MODEL).items()
    }
    position_lines: list[Line] = [
        line | {"position": _middle_position(line)}
        for line in by_position
        if line["length"] == longest[line["part"], line["run"]]
    ]
    names = [line["run"] for line in (*curves, *timed, *position_lines)]
    for name, part_lines, title, axes in (
        ("curves", curves, "Quality against the cost of training", (_against_time, _against_flops)),
        ("quality", timed, "Quality against time per step", (_against_step,)),
        (
            "context",
            position_lines,
            "Quality by position, at the longest sequence length that was scored",
            (_against_position,),
        ),
    ):
        if part_lines:
            rows = [[panel(of_part) for panel in axes] for of_part in group_lines(part_lines, "part").values()]
            plot_panels(rows, out / f"{name}.png", curve="run", names=names, title=title)


def _against_time(lines: list[Line]) -> Panel:
    return _panel(lines, "minutes", f"minutes of training, steps timed side by side{_hardware(lines)}")


def _against_flops(lines: list[Line]) -> Panel:
    scaled = [line | {"flops": line["flops"] / 1e12} for line in lines]
    return _panel(scaled, "flops", "model FLOPs of training, 10¹²")


def _against_step(lines: list[Line]) -> Panel:
    return _panel(lines, "step_ms", f"ms per step, median, timed side by side{_hardware(lines)}")


def _hardware(lines: list[Line]) -> str:
    """The devices that the steps were timed on, on a line of their own."""
    devices = dict.fromkeys(line["timed_on"] for line in lines if "timed_on" in line)
    return "\n" + " and ".join(devices) if devices else ""


def _against_position(lines: list[Line]) -> Panel:
    return _panel(lines, "position", "position in the sequence, middle of each interval")


def _panel(lines: list[Line], x: str, label: str) -> Panel:
    """Returns the panel of one part, with a band over the seeds."""
    first = lines[0]
    title = f"trained at sequence length {first['trained_length']:,}"
    quality = "perplexity per token, test split; band: lowest to highest seed"
    return Panel(lines, x, label, "perplexity", quality, title=title, band=("lowest", "highest"))


def _middle_position(line: Line) -> float:
    """Returns the middle of the positions of a slice such as 64–127."""
    first, _, last = line["slice"].partition("–")
    return (int(first) + int(last) + 1) / 2
