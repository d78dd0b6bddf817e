"""Tables and pictures of a study of trunks, from planted lines whose means are known."""

import math

import pytest

from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from studies.protocol.hypotheses import Hypothesis, step_name
from studies.quality.report import study_tables, summarize, write_study

ABOUT = {
    "family": "flash",
    "parameters": 1000,
    "rate": 3e-3,
    "trained_length": 512,
    "corpus_hash": "x",
    "split": "test",
    "tokens_blocks": [4, 5] * 10,
    "corpus": "books-wiki-imdb",
    "batch_tokens": 4096,
}


def score_line(run, seed, share, perplexity, **more):
    about = {
        "part": "rows_of_512",
        "run": run,
        "seed": seed,
        "share": share,
        "step": round(3200 * share),
        "length": 512,
    }
    losses = [count * math.log(perplexity) for count in ABOUT["tokens_blocks"]]
    return {**ABOUT, **about, "perplexity": perplexity, "nll_blocks": losses, **more}


LINES = [
    score_line("flash", 0, 0.5, 60.0),
    score_line("flash", 0, 1.0, 40.0),
    score_line("flash", 0, 1.0, 44.0, length=2048),
    score_line("flash", 0, 1.0, 90.0, slices="recall", slice="recall"),
    score_line("flash", 0, 1.0, 80.0, slices="positions", slice="0–63"),
    score_line("flash", 0, 1.0, 35.0, slices="positions", slice="64–511"),
    score_line("flash", 0, 1.0, 999.0, split="validation"),
    score_line("flash", 1, 0.5, 60.0),
    score_line("flash", 1, 1.0, 90.0),
    {"part": "rows_of_512", "run": "flash", "seed": 2, "failed": "loss nan", "rate": 3e-3},
    score_line("mc_tfm", 0, 0.5, 50.0),
    score_line("mc_tfm", 0, 1.0, 30.0),
]
HYPOTHESES = [Hypothesis(1, "rows_of_512", "flash", "no worse", "mc_tfm")]
TIMES = [{"run": step_name("rows_of_512", "flash"), "microbatch_ms": 300.0, "model_flops": 1e9}]


def test_seeds_are_averaged_and_failures_counted():
    summaries = {(x["run"], x["share"], x["length"], x.get("slice")): x for x in summarize(LINES, TIMES)}
    full = summaries["flash", 1.0, 512, None]
    assert full["perplexity"] == pytest.approx(60.0)  # √(40 · 90)
    assert (full["lowest"], full["highest"], full["seeds"], full["failed"]) == (40.0, 90.0, 2, 1)
    assert full["minutes"] == pytest.approx(16.0) and full["flops"] == pytest.approx(3.2e12)
    assert summaries["flash", 0.5, 512, None]["minutes"] == pytest.approx(8.0)
    assert "minutes" not in summaries["mc_tfm", 1.0, 512, None]
    assert summaries["flash", 1.0, 512, "recall"]["perplexity"] == pytest.approx(90.0)
    assert all(math.isfinite(line["perplexity"]) for line in summaries.values())


@pytest.mark.parametrize("lines", [LINES, LINES[::-1]], ids=["forward", "backward"])
def test_the_table_has_the_best_first_and_every_score(lines):
    """In columns that do not depend on which run was made first."""
    title, _, head, _, *rows = study_tables(summarize(lines, TIMES)).splitlines()
    assert title == "rows_of_512: sequences of 512 tokens, 3,200 steps of 4,096 tokens; test split of books-wiki-imdb"
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns == [
        *("model", "parameters", "rate", "at 0.5 of the budget", "perplexity", "lowest", "highest", "seeds", "failed"),
        *("ms per step", "minutes", "at length 2048", "recall"),
    ]
    first, second = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert first[0] == "mc_tfm" and first[3:5] == ["50.00", "30.00"] and first[-4:] == ["", "", "", ""]
    assert second[0] == "flash" and second[3:] == [
        *("60.00", "60.00", "40.00", "90.00", "2", "1", "300", "16.0", "44.00", "90.00"),
    ]


def test_a_model_that_never_stays_finite_is_in_the_table():
    about = {"part": "rows_of_512", "run": "lost", "failed": "loss nan", "rate": 0.1}
    failed = [about | {"seed": seed} for seed in (0, 1)]
    *_, last = study_tables(summarize([*LINES, *failed], [])).splitlines()
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[0] == "lost" and cells[2] == "0.1" and cells[7:9] == ["0", "2"] and cells[3:7] == [""] * 4
    assert "no run stayed finite" in study_tables(summarize(failed, []))


def test_files_and_pictures(tmp_path):
    with pytest.raises(InputError, match="has no finished run: make some with --workdir=FOLDER"):
        write_study("A study", HYPOTHESES, tmp_path)
    (tmp_path / "runs").mkdir()
    write_jsonl(tmp_path / "runs" / "one.jsonl", LINES[:5])
    write_jsonl(tmp_path / "runs" / "two.jsonl", LINES[5:])
    assert write_study("A study", HYPOTHESES, tmp_path).startswith("A study\n\nRatios of perplexities")
    assert not (tmp_path / "curves.png").exists()  # no step was timed
    write_jsonl(tmp_path / "step_times.jsonl", TIMES)
    write_study("A study", HYPOTHESES, tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 10_000 and (tmp_path / "context.png").stat().st_size > 10_000
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    assert len(read_jsonl(tmp_path / "summary.jsonl")) == 8 and not (tmp_path / "tuning").exists()
    tuned = [
        {
            "model": "flash",
            "round": 3,
            "tokens": 9,
            "key": "train.learning_rate",
            "value": x,
            "loss": abs(x - 2),
            "seed": 0,
        }
        for x in (1.0, 2.0, 4.0)
    ]
    (tmp_path / "rates").mkdir()
    write_jsonl(tmp_path / "rates" / "flash.jsonl", tuned)
    assert "| flash |          2 |          0.0000 |" in write_study("A study", HYPOTHESES, tmp_path)
    (best,) = read_jsonl(tmp_path / "tuning" / "best.jsonl")
    assert best["value"] == 2.0 and (tmp_path / "tuning" / "tuning.png").exists()
    (verdict,) = read_jsonl(tmp_path / "verdicts.jsonl")
    assert verdict["verdict"] == "undecided" and verdict["ratios"] == pytest.approx({"0": 40 / 30})
