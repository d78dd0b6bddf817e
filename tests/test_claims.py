"""The page of claims, from a study's folders that are made up and from the committed results."""

import json
import pathlib

from test_scripts import load

from configs import claims as study
from flash_lm.config import parse
from flash_lm.models.families import complete_config
from flash_lm.study import changed

ROOT = pathlib.Path(__file__).parent.parent


def write_run(folder: pathlib.Path, name: str, seed: int, loss: float, lengths=(512,)) -> None:
    workdir = folder / f"{name}_seed_{seed}"
    workdir.mkdir(parents=True)
    scores = [
        {"split": split, "length": length, "loss": loss + i, "train_step_ms": 100, "step": 500}
        for i, length in enumerate(lengths)
        for split in ("validation", "test")
    ]
    curve = [
        {"split": "validation", "step": step, "loss": loss + 1 / step, "train_seconds": step} for step in (50, 500)
    ]
    (workdir / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))


def test_finished_runs_get_a_verdict_and_the_others_say_so(tmp_path, capsys):
    script, out = load("claims"), tmp_path / "results"
    for seed in range(2):
        write_run(tmp_path / "runs", "flash", seed, 5.0, lengths=(512, 1024))
        write_run(tmp_path / "runs", "transformer_plus_plus", seed, 5.1)
        write_run(tmp_path / "runs", "flash_local", seed, 4.9 + 0.2 * seed)
        write_run(tmp_path / "runs", "rotary_alone", seed, 4.8)
    script.main([f"--runs={tmp_path / 'runs'}", f"--out={out}"])
    text = (out / "CLAIMS.md").read_text()
    rows = {row.split(" | ")[0].strip("| "): row for row in text.splitlines() if row.startswith("| ")}
    no_worse = rows["FLASH is no worse than Transformer++ at 512"]
    assert "**reproduced at small scale**" in no_worse
    assert "perplexity of flash 0.905 times that of transformer_plus_plus (0.905–0.905, 2 seeds)" in no_worse
    assert "**contradicted at small scale**" in rows["Three kinds of positions are better than rotary ones alone"]
    assert (
        "no finished run of flash_global"
        in rows["Local attention matters more than global, and both together are best"]
    )
    assert "**not run**" in rows["FLASH's step time is flat in the length"]
    assert len(rows) == len(script.CLAIMS) + 1
    assert text.strip() in capsys.readouterr().out
    script.main([f"--out={out}"])  # the page alone
    assert (out / "CLAIMS.md").read_text() == text


def test_runs_of_another_machine_stay(tmp_path):
    script, out = load("claims"), tmp_path / "results"
    for seed, machine in enumerate(("one", "other")):
        write_run(tmp_path / machine, "flash", seed, 5.0, lengths=(512, 1024))
    write_run(tmp_path / "other", "flash", 0, 4.0)  # and one that is here replaces what was
    for machine in ("one", "other"):
        script.main([f"--runs={tmp_path / machine}", f"--out={out}"])
    runs, _ = script.read_results(out)
    assert {seed: run.scores[512]["loss"] for seed, run in runs["flash"].items()} == {0: 4.0, 1: 5.0}
    assert [line["step"] for line in runs["flash"][1].curve] == [50, 500] and 1024 not in runs["flash"][0].scores


def test_the_committed_page_is_that_of_the_committed_results(tmp_path):
    script = load("claims")
    evidence = script.Evidence(*script.read_results(ROOT / "results"))
    assert (ROOT / "results" / "CLAIMS.md").read_text() == script.page(evidence) + "\n"


def test_the_runs_of_the_study_are_possible():
    config = study.get_config()
    runs = study.get_runs(config)
    for changes in runs.values():
        complete_config(parse(changed(config, changes)))
    assert len(runs) == len(study.SEEDS) * len(study.RUNS)
