"""Tables and curves from result files."""

import itertools
import json
import pathlib

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from flash_lm.errors import InputError
from flash_lm.report.comparison import write_comparison
from flash_lm.report.curves import Curve, plot_curves
from flash_lm.report.markdown import RUNS, markdown_table
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.report.reproduction import plot_quality_against_step_time
from flash_lm.report.results import labels, newest_results, validation_curve
from flash_lm.runs.jsonl import append_jsonl, read_jsonl, write_jsonl
from flash_lm.runs.provenance import merge_provenance
from flash_lm.sweeps.grid import is_done


def test_a_truncated_last_line_is_ignored(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n{"a": ')
    assert read_jsonl(tmp_path / "x.jsonl") == [{"a": 1}, {"a": 2}]


def test_appending_lines_creates_the_folder(tmp_path):
    for value in (1, 2):
        append_jsonl(tmp_path / "new" / "x.jsonl", [{"a": value}])
    assert read_jsonl(tmp_path / "new" / "x.jsonl") == [{"a": 1}, {"a": 2}]


def test_the_newest_results_of_each_run_on_the_split(tmp_path):
    for name, values in {"one": [1, 2], "two": [3]}.items():
        (tmp_path / name).mkdir()
        lines = [{"split": split, "value": value} for value in values for split in ("test", "validation")]
        (tmp_path / name / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    actual = newest_results([tmp_path / "one", tmp_path / "two"], "test")
    assert [line["value"] for line in actual] == [2, 3]


def test_a_damaged_line_is_named(tmp_path):
    for damaged in (b'{"a": ', b'{"a": "\xff"}'):
        (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n' + damaged + b'\n{"a": 3}\n')
        with pytest.raises(InputError, match=r"x.jsonl: line 2 is damaged"):
            read_jsonl(tmp_path / "x.jsonl")


def test_a_truncated_last_line_is_replaced(tmp_path):
    """The process was killed while writing; the next line must not be lost."""
    file = tmp_path / "new" / "x.jsonl"
    for before, lines in ((b"", [{"b": "ü"}]), (b'{"a": 1}\n{"b', [{"a": 1}, {"b": "ü"}]), (b'{"b', [{"b": "ü"}])):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(before)
        append_jsonl(file, [{"b": "ü"}])
        assert read_jsonl(file) == lines
    append_jsonl(tmp_path / "other" / "x.jsonl", [{"c": 3}])
    append_jsonl(tmp_path / "other" / "x.jsonl", [{"d": 4}])
    assert read_jsonl(tmp_path / "other" / "x.jsonl") == [{"c": 3}, {"d": 4}]


def test_the_provenance_of_several_sessions_names_each_once():
    actual = {"git": "aa", "versions": "python 3, jax 1", "dirty": False}
    for git, versions in (("bb", "python 3, jax 1"), ("bb", "python 3, jax 2"), ("aa", "python 3, jax 1")):
        actual = merge_provenance(actual, {"git": git, "versions": versions, "dirty": git == "bb"})
    assert actual == {"git": "aa, bb", "versions": "python 3, jax 1, python 3, jax 2", "dirty": True}
    assert merge_provenance({}, {"git": "aa", "dirty": None}) == {"git": "aa", "dirty": None}
    assert merge_provenance({"git": "aa"}, {"git": None, "dirty": False}) == {"git": "aa", "dirty": False}


def scored_run(folder: pathlib.Path, *lines: dict) -> pathlib.Path:
    """A run with a curve and these results."""
    folder.mkdir(parents=True)
    point = {"split": "validation", "step": 5, "perplexity": 98.5, "tokens": 40960.0, "train_seconds": 1.0}
    write_jsonl(folder / "metrics.jsonl", [point])
    about = {
        "run": folder.name,
        "corpus": "x",
        "corpus_hash": "aa",
        "length": 8,
        "trained_length": 8,
        "family": "flash",
        "step": 5,
    }
    about |= {"split": "test", "bits_per_byte": 2.0, "perplexity": 50.0}
    append_jsonl(folder / "results.jsonl", [about | line for line in lines])
    return folder


def test_a_comparison_shows_both_runs_of_the_same_folder_name(tmp_path):
    runs = [scored_run(tmp_path / side / "flash", {"perplexity": x}) for side, x in (("a", 51.5), ("b", 52.5))]
    other = scored_run(tmp_path / "a" / "quad", {"perplexity": 53.5})
    table = write_comparison([*runs, other, runs[0]], "test", tmp_path / "out")
    assert [line["run"] for line in read_jsonl(tmp_path / "out" / "results.jsonl")] == ["a/flash", "b/flash", "quad"]
    assert [line["run"] for line in read_jsonl(tmp_path / "out" / "validation.jsonl")] == ["a/flash", "b/flash", "quad"]
    assert all(f"{x}.50" in table for x in (51, 52, 53))
    assert list(labels([runs[0], f"{tmp_path}/b/../a/flash"]))  # the same one, written in two ways


def test_a_table_says_which_runs_were_trained_at_once(tmp_path):
    """Their times are those of several runs. Without such a run there is no column."""
    runs = [scored_run(tmp_path / "together", {"vmapped_runs": 4}), scored_run(tmp_path / "alone", {})]
    rows = [row.split("|") for row in write_comparison(runs, "test", tmp_path / "out").splitlines() if "|" in row]
    at = [cell.strip() for cell in rows[0]].index("runs at once")
    assert {row[1].strip(): row[at].strip() for row in rows[2:]} == {"together": "4", "alone": ""}
    assert "at once" not in write_comparison(runs[1:], "test", tmp_path / "out")


def test_scores_of_different_rows_or_texts_are_not_ranked(tmp_path):
    runs = [
        scored_run(tmp_path / "long", {"length": 16, "trained_length": 16, "bits_per_byte": 1.0}),
        scored_run(tmp_path / "short", {"bits_per_byte": 2.0}, {"length": 16, "bits_per_byte": 1.5}),
        scored_run(tmp_path / "other", {"corpus": "y", "bits_per_byte": 0.5}),
        scored_run(tmp_path / "best", {"bits_per_byte": 1.5}),
    ]
    table = write_comparison(runs, "test", tmp_path / "out")
    titles = [part for part in table.split("\n\n") if not part.startswith("|")]
    assert titles == [
        "x, causal_lm, sequence length 8, test split",
        "x, causal_lm, sequence length 16, test split",
        "y, causal_lm, sequence length 8, test split",
    ]
    first = table.split("\n\n")[1].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in first] == ["best", "short"]


def test_texts_of_the_same_name_are_distinguished_by_their_hash(tmp_path):
    """Only if there are several."""
    lines = {"mine": {"corpus_hash": "aa"}, "yours": {"corpus_hash": "bb"}}
    runs = {name: scored_run(tmp_path / name, {"corpus": "text"} | line) for name, line in lines.items()}
    titles = lambda names: [
        part.partition(",")[0]
        for part in write_comparison([runs[name] for name in names], "test", tmp_path / "out").split("\n\n")
        if not part.startswith("|")
    ]
    assert titles(["mine"]) == ["text"]
    assert titles(["mine", "yours"]) == ["text aa", "text bb"]


def test_a_result_is_that_of_the_named_checkpoint(tmp_path):
    """Without a name the newest checkpoint, also if another one or another text was scored later."""
    run = scored_run(
        tmp_path / "run",
        {"step": 5, "checkpoint": "newest", "perplexity": 5.0},
        {"step": 9, "checkpoint": "newest", "perplexity": 9.0},
        {"step": 7, "checkpoint": "best", "perplexity": 7.0},
        {"step": 3, "checkpoint": "step", "perplexity": 3.0},
        {"step": 9, "checkpoint": "newest", "perplexity": 1.0, "own_corpus": False},
    )
    named = {
        f"{run}{which}": x for which, x in (("", 9.0), ("@newest", 9.0), ("@best", 7.0), ("@3", 3.0), ("@4", None))
    }
    for name, expected in named.items():
        assert [line["perplexity"] for line in newest_results([name], "test")] == ([expected] if expected else [])
    both = newest_results([run, f"{run}@best"], "test")
    assert [line["run"] for line in both] == ["run", "run@best"]
    only_best = scored_run(tmp_path / "best", {"checkpoint": "best"})
    assert not newest_results([only_best], "test") and newest_results([f"{only_best}@best"], "test")
    assert not is_done(run, "test", 7, [9]) and is_done(run, "test", 9, [8])
    append_jsonl(run / "results.jsonl", [{"split": "train", "step": 9, "length": 8, "own_corpus": False}])
    assert not is_done(run, "train", 9, [8])


def test_the_table_is_aligned_markdown():
    result = {"family": "flash", "parameters": 1234567, "step": 300, "perplexity": 12.346, "train_step_ms": 99.6}
    table = markdown_table([result, result | {"family": "a_long_family_name", "perplexity": 1000.0}])
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["", "flash", "1,234,567", "300", "12.35", "", "", "100", "", ""]
    assert len(cells) == len(RUNS)


def test_curves_are_drawn_from_validation_lines(tmp_path):
    lines = [
        {"step": 1, "split": "train", "loss": 3.0},
        {"step": 1, "split": "validation", "train_seconds": 2.0, "perplexity": 20.0},
        {"step": 2, "split": "validation", "train_seconds": 4.0, "perplexity": 10.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = validation_curve(tmp_path)
    assert [line["step"] for line in curve] == [1, 2]
    plot_curves({"flash": Curve([curve], [curve[-1]])}, tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_number_in_a_legend_equals_that_of_the_table(tmp_path, monkeypatch):
    """It is not the last point of the curve, which is of a part of the split, as the axis says."""
    texts = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: texts.extend(figure.findobj(Text)))
    (folder := tmp_path / "mine").mkdir()
    point = {"split": "validation", "step": 5, "perplexity": 98.5, "tokens": 40960.0, "train_seconds": 1.0}
    write_jsonl(folder / "metrics.jsonl", [point])
    about = {
        "run": "mine",
        "corpus": "x",
        "corpus_hash": "aa",
        "length": 8,
        "family": "flash",
        "step": 5,
        "bits_per_byte": 2.0,
    }
    append_jsonl(folder / "results.jsonl", [about | {"split": "test", "perplexity": 112.63, "tokens": 1.6e6}])
    table = write_comparison([folder], "test", tmp_path / "out")
    written = [text.get_text() for text in texts]
    assert "112.63" in table and "mine: 112.6" in written
    assert "validation perplexity per token,\n40,960 tokens per point" in written
    assert any("test split" in text for text in written)


def test_examples_are_compared_by_accuracy_too(tmp_path):
    """The table also has the first step with an accuracy of 99 %."""
    accuracies = {"solved": [0.1, 0.99, 0.98, 1.0], "unsolved": [0.1, 0.2, 0.3, 0.98]}
    for pack in ("examples", "stream"):
        for name, values in accuracies.items():
            (folder := tmp_path / pack / name).mkdir(parents=True)
            about = {"split": "validation", "perplexity": 2.0, "bits_per_byte": 1.0, "train_seconds": 1.0}
            lines = [about | {"step": 50 * (i + 1), "accuracy": x} for i, x in enumerate(values)]
            write_jsonl(folder / "metrics.jsonl", lines)
            result = lines[-1] | {"run": name, "corpus": "x", "corpus_hash": "aa", "length": 8, "pack": pack}
            append_jsonl(folder / "results.jsonl", [result])
        folders = [tmp_path / pack / name for name in accuracies]
        table = write_comparison(folders, "validation", tmp_path / pack / "out")
        assert table and ("99% from step" in table) == (pack == "examples")
        assert (tmp_path / pack / "out" / "accuracy.png").exists() == (pack == "examples")
    rows = (tmp_path / "examples" / "out" / "table.md").read_text().splitlines()
    solved, unsolved = (line.split("|")[-2].strip() for line in rows[-2:])
    assert (solved, unsolved) == ("200", "")


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((64, 128, 2048), [64, 128, 2048]),
        ((580, 616, 721.3, 721.5, 765), [550, 600, 650, 700, 750, 800]),
        ((5, 5), [5]),
        ((33, 33.5, 49), [30, 35, 40, 45, 50]),
        ((3.1e13, 3.2e13, 1.3e14), [3e13, 5e13, 7e13, 1e14, 1.5e14]),
    ],
)
def test_ticks_are_at_the_values_if_they_have_room(tmp_path, monkeypatch, values, ticks):
    drawn = []
    monkeypatch.setattr(Axes, "set_xticks", lambda axes, values, **_: drawn.append(values))
    plot_panels(
        [[Panel([{"family": "flash", "x": x, "y": 1.0} for x in values], "x", "x", "y", "y")]], tmp_path / "a.png"
    )
    assert drawn == [pytest.approx(ticks)]


def test_the_labels_of_panels_do_not_overlap(tmp_path, monkeypatch):
    """Also for curves that end at the same height; lines without a value are left out."""
    drawn = []
    monkeypatch.setattr(Axes, "annotate", lambda axes, text, xytext, **_: drawn.append((id(axes), text, xytext[1])))
    lines = [
        {"family": family, "context": context, "ms_a_token": 1.0 + context / 1e3, "state_bytes": 4096}
        for family in ("flash", "performer", "aft_simple")
        for context in (256, 1024)
    ]
    lines.append({"family": "flash_quad", "context": 1024, "state_bytes": 10**9, "does_not_fit": "1 GB"})
    row = [Panel(lines, "context", "tokens", key, key) for key in ("ms_a_token", "state_bytes")]
    plot_panels([row, row], tmp_path / "new" / "decode.png")
    assert (tmp_path / "new" / "decode.png").read_bytes().startswith(b"\x89PNG")
    assert [text for _, text, _ in drawn].count("flash_quad") == 2
    for axes in {axes for axes, _, _ in drawn}:
        heights = sorted(height for panel, _, height in drawn if panel == axes)
        assert len(heights) >= 3 and min(b - a for a, b in itertools.pairwise(heights)) > 0.04


def test_a_curve_looks_alike_in_several_figures(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, *_, color, **__: drawn.append(color))
    line = lambda family: {"family": family, "x": 1.0, "y": 1.0}
    for families in (("flash", "performer"), ("performer",)):
        panel = Panel([line(family) for family in families], "x", "x", "y", "y")
        plot_panels([[panel]], tmp_path / "a.png", names=("flash", "performer"))
    assert drawn[2] == drawn[1] != drawn[0]


def test_a_picture_names_every_point_apart_from_the_others(tmp_path, monkeypatch):
    """Also of points that are near to each other; read from the figure that is written."""
    boxes = []

    def keep(figure, *_, **__):
        figure.canvas.draw()
        texts = [text for text in figure.axes[0].texts if text.get_text()]
        boxes.extend((text.get_text(), Text.get_window_extent(text)) for text in texts)

    monkeypatch.setattr(Figure, "savefig", keep)
    points = {f"family_{i}": (100 + 3 * (i % 5), 50 + i // 5) for i in range(20)}
    lines = [{"run": x, "family": x, "microbatch_ms": ms, "perplexity": y} for x, (ms, y) in points.items()]
    plot_quality_against_step_time(lines, "perplexity", tmp_path / "quality.png", "title")
    assert {name for name, _ in boxes} == points.keys()
    overlaps = [(a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[:i] if one.overlaps(other)]
    assert not overlaps
