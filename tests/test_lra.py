"""The table and the picture of sweeps of Long Range Arena's stand-ins, from planted runs."""

import pytest
from small import load_script

from flash_lm.configs.lra import _published, _study
from flash_lm.errors import InputError
from flash_lm.jsonl import read_jsonl, write_jsonl


def run(folder, accuracy: float, **more) -> None:
    about = {"majority": 0.25, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1, "split": "test"}
    folder.mkdir(parents=True)
    write_jsonl(folder / "results.jsonl", [about | {"accuracy": accuracy} | more])


def test_arms_stand_beside_the_published_figures(tmp_path, capsys):
    runs, out = tmp_path / "runs", tmp_path / "out"
    run(runs / "listops" / "flash_scratch", 0.5)
    run(runs / "listops" / "flash_pretrained", 0.625)
    run(runs / "listops" / "flash_masked", 0.9)  # no classifier
    run(runs / "image" / "transformer_scratch", 0.75)
    run(runs / "image" / "mega_scratch", 0.1, split="validation")
    load_script("lra").main([f"--runs={runs}", f"--out={out}"])
    found = [(x["lra"], x["family"], x["arm"], x["accuracy"]) for x in read_jsonl(out / "runs.jsonl")]
    assert found == [
        ("listops", "flash", "pretrained", 0.625),
        ("listops", "flash", "scratch", 0.5),
        ("image", "transformer", "scratch", 0.75),
    ]
    rows = {row[1]: row[2:] for row in (line.split("|") for line in (out / "table.md").read_text().splitlines())}
    cells = {name.strip(): [x.strip() for x in row[:-1]] for name, row in rows.items()}
    assert cells["family"] == [
        f"{task}, {x}" for task in ("listops", "image") for x in ("scratch", "pretrained", "published")
    ]
    assert cells["flash"] == ["50.0", "62.5", "", "", "", ""]
    assert cells["transformer"] == ["", "", "36.4", "75.0", "", "42.4"]
    assert cells["most frequent label"] == ["25.0", "25.0", "", "25.0", "", ""]
    assert (out / "lra.png").stat().st_size > 10_000


def test_no_sweep(tmp_path):
    with pytest.raises(InputError, match="has no scored sweep: make one with --workdir="):
        load_script("lra").main([f"--runs={tmp_path}", f"--out={tmp_path / 'out'}"])


def test_the_families_are_those_of_the_published_table_and_ours():
    assert set(_published.ACCURACY) == set(_study.FAMILIES) - {"flash", "flash_quad"}
    assert all(len(figures) == len(_published.TASKS) for figures in _published.ACCURACY.values())
