"""Findings in README: checked against the lines by other code, and with planted lines."""

import json
import math
import pathlib
import re
import shutil
import string

import numpy as np
import pytest
from small import ROOT

from flash_lm.errors import InputError
from flash_lm.report.marked_blocks import replace_block
from flash_lm.report.ratios import NoFigureError
from studies.curves import perplexity_after, ratio_at_equal_time, seed_curves
from studies.findings import GPU, SUMMARY, VERDICTS, Results, figures, ratios_on_gpu, render_readme

README = (ROOT / "README.md").read_text()
STUDY = (ROOT / "studies" / "quality" / "README.md").read_text()


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plant_results(folder: pathlib.Path, verdict=lambda line: line, summary=lambda line: line) -> Results:
    """Copies our results; each line of two files of the study is changed by these functions."""
    shutil.copytree(ROOT / "studies", folder / "studies", ignore=shutil.ignore_patterns("*.py", "*.png"))
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    for path, change in ((VERDICTS, lambda line: verdict(add_interval(line))), (SUMMARY, summary)):
        (folder / path).write_text("".join(json.dumps(change(line)) + "\n" for line in read(ROOT / path)))
    return Results(folder)


def add_interval(line: dict) -> dict:
    """Adds the interval that these tests ask for to a verdict."""
    return line | ({"low": 0.123, "high": 4.567} if line.get("ratios") else {})


def is_about(line: dict, number: int, first: str) -> bool:
    return line["number"] == number and line["hypothesis"].startswith(f"rows_of_512: {first} at most")


def test_readme_has_what_the_command_writes():
    assert render_readme(README, Results(ROOT)) == README, "run python -m studies report"


@pytest.mark.parametrize(
    ("number", "first", "figure", "verdict", "words"),
    [
        (1, "flash_scores", "flash_tokens", "holds", "no worse, by the rule of the study"),
        (1, "flash_scores", "flash_tokens", "undecided", "undecided whether it is no worse"),
        (1, "flash_scores", "flash_tokens", "does not hold", "worse, by the rule of the study"),
        (2, "flash_scores", "flash_time", "holds", "better, by the rule of the study"),
        (2, "flash_scores", "flash_time", "does not hold", "not better, by the rule of the study"),
        (3, "transformer_plus_plus", "softmax_tokens", "undecided", "undecided whether it is better"),
        (8, "flash_scores", "flash_divisor", "holds", "better, by the rule of the study"),
        (10, "flash_quad", "quad_time", "does not hold", "worse, by the rule of the study"),
    ],
)
def test_another_verdict_gives_another_phrase(tmp_path, number, first, figure, verdict, words):
    new = add_interval({"verdict": verdict, "ratios": {"0": 2.0, "1": 8.0}})
    results = plant_results(tmp_path, lambda line: line | (new if is_about(line, number, first) else {}))
    figures_now = figures(results)
    said = f"[4.000 times]({VERDICTS}) the perplexity of {NAMES[figure]} (95 %: 0.123 to 4.567): {words}"
    assert figures_now[figure] == said and said in render_readme(README, results)


NAMES = {
    **dict.fromkeys(("flash_tokens", "flash_time", "quad_time"), "Transformer++"),
    "softmax_tokens": "the Linear Transformer",
    "flash_divisor": "FLASH as it was",
}


@pytest.mark.parametrize(
    ("verdict", "words"),
    [("undecided", "no figure yet (not timed as the rule asks)"), ("not run", "no figure yet (not run)")],
)
def test_what_has_no_ratio_says_why(tmp_path, verdict, words):
    def change(line: dict) -> dict:
        return {key: line[key] for key in ("number", "hypothesis")} | {"verdict": verdict, "figure": "not timed"}

    is_it = lambda line: is_about(line, 2, "flash_scores")
    results = plant_results(tmp_path, lambda line: change(line) if is_it(line) else line)
    assert figures(results)["flash_time"] == words


def test_a_verdict_without_an_interval_is_no_sentence(tmp_path):
    without = lambda line: {key: value for key, value in line.items() if key not in ("low", "high")}
    results = plant_results(tmp_path, without)
    with pytest.raises(
        InputError, match=r"quality/results/verdicts.jsonl: 'rows_of_512: flash_scores at most .* lacks ratios, low"
    ):
        figures(results)


def test_what_stays_as_good_and_what_does_not(tmp_path):
    new = {("flash_scores", 512): 70.0, ("flash_scores", 2048): 80.0, ("flash_quad", 512): 60.0}
    new |= {("transformer_plus_plus", 512): 74.5, ("transformer_plus_plus", 2048): 75.9, ("flash_quad", 2048): 61.3}

    def change(line: dict) -> dict:
        is_full = line["part"] == "rows_of_512" and line["share"] == 1 and "slice" not in line
        return line | ({"perplexity": new.get((line["run"], line["length"]), 1.0)} if is_full else {})

    figures_now = figures(plant_results(tmp_path, summary=change))
    moves = {key: re.sub(r"\]\([^)]*\)", "]", str(value)) for key, value in figures_now.items() if "moves" in key}
    assert moves == {
        "flash_moves": "goes from [70.0] to [80.0]",
        "softmax_moves": "stays as good, [75.9] after [74.5]",
        "quad_moves": "goes from [60.0] to [61.3]",
    }


def test_each_figure_stands_in_a_sentence(tmp_path):
    texts = [(ROOT / "studies" / f"{name}.md").read_text() for name in ("caption", "findings")]
    asked = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
    assert asked == figures(plant_results(tmp_path)).keys()


def scores(run: str, seed: int) -> tuple[list[int], list[float]]:
    """Steps and losses of each budget, straight from the file."""
    lines = read(ROOT / "studies" / "quality" / "results" / "runs.jsonl")
    lines = [x for x in lines if (x["part"], x["run"], x["seed"]) == ("rows_of_512", run, seed)]
    full_scores = [x for x in lines if (x["split"], x["length"], x.get("slice")) == ("test", 512, None)]
    return [x["step"] for x in full_scores], [x["loss"] for x in full_scores]


def parabola(steps, losses, at: float) -> float:
    """Evaluates a least-squares fit, which passes through three points."""
    return float(np.polyval(np.polyfit(np.log(steps), losses, 2), math.log(at)))


def test_perplexities_between_budgets_are_those_of_a_fit():
    curves = seed_curves(Results(ROOT).runs(), "rows_of_512", "linear_transformer")
    assert sorted(curves) == [0, 1, 2]
    fitted = {seed: math.exp(parabola(*scores("linear_transformer", seed), 1220)) for seed in curves}
    assert {seed: perplexity_after(curve, 1220) for seed, curve in curves.items()} == pytest.approx(fitted)
    *some, last = (f"{x:.1f}" for x in fitted.values())
    sentence = f"{', '.join(some)} and {last} by seed"
    assert sentence in README and sentence in STUDY


def test_the_ratio_on_a_gpu_is_that_of_a_fit():
    ms = {x["family"]: x["median_ms"] for x in read(ROOT / GPU) if x["length"] == 512}
    slower = ms["flash"] / ms["transformer_plus_plus+quadratic.implementation=cudnn"]
    assert slower > 1
    fitted = {}
    for seed in range(3):
        (steps, ours), (_, theirs) = scores("flash_scores", seed), scores("transformer_plus_plus", seed)
        fitted[seed] = math.exp(parabola(steps, ours, steps[-1] / slower) - theirs[-1])
    assert ratios_on_gpu(Results(ROOT)) == pytest.approx(fitted)
    first, second, third = (f"{x:.3f}" for x in fitted.values())
    mean = f"{math.exp(np.log([*fitted.values()]).mean()):.3f}"
    text = " ".join(STUDY.split())
    assert f"would give {first}, {second} and {third}, in the mean {mean}" in text and f"level ({mean})" in text
    assert f"would give {mean} times" in README


def test_equal_time_on_planted_curves():
    of = lambda shift: [(steps, np.array(5 - 0.5 * math.log(steps / 100) + shift)) for steps in (100, 200, 400)]
    assert ratio_at_equal_time(of(0.1), of(0.0), 1.0) == pytest.approx(math.exp(0.1))
    assert ratio_at_equal_time(of(0.0), of(0.0), 2.0) == pytest.approx(math.exp(0.5 * math.log(2)))  # 200 and 400 steps
    assert ratio_at_equal_time(of(0.0), of(0.0), 0.5) == pytest.approx(math.exp(-0.5 * math.log(2)))
    with pytest.raises(NoFigureError):
        ratio_at_equal_time(of(0.0), of(0.0), 5.0)


def test_curves_are_of_one_model_and_its_length():
    line = {
        "part": "rows",
        "run": "a",
        "seed": 1,
        "split": "test",
        "length": 8,
        "trained_length": 8,
        "step": 2,
        "loss": 3,
    }
    others = [{"length": 16}, {"split": "validation"}, {"slice": "rest"}, {"run": "b"}, {"part": "long"}]
    failed = {"part": "rows", "run": "a", "seed": 2, "failed": "loss nan"}
    lines = [line | {"step": 4, "loss": 2}, failed, line, *(line | other for other in others)]
    assert seed_curves(lines, "rows", "a") == {1: [(2, 3), (4, 2)]}


MARKED = "a\n<!-- x: written by y -->\nold\n<!-- end of x -->\nb\n"


def test_what_stands_between_the_markers_is_replaced():
    text = "\\1 new"
    assert replace_block(MARKED, "x", "y", text) == MARKED.replace("old", text)


@pytest.mark.parametrize("before", ["", MARKED + MARKED, MARKED.replace("end of x", "end"), MARKED.partition("old")[0]])
def test_a_page_without_the_markers_is_refused(before):
    with pytest.raises(InputError, match="must have <!-- x: written by y --> once"):
        replace_block(before, "x", "y", "new")
