"""Runs that differ only in their seed: grouped by their configs, with an interval as scipy has it."""

import json
import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from flash_lm.configs.base import get_config
from flash_lm.report.comparison import write_comparison
from flash_lm.report.results import labels
from flash_lm.report.seeds import compare_seeds, group_seeds, seed_table
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.runs.run_name import run_name


def scored(folder, seed: int, perplexity: float, **keys) -> str:
    """A run's folder with a config, a curve and a result."""
    folder.mkdir(parents=True)
    config = get_config().to_dict() | {"seed": seed}
    config["model"] |= keys
    (folder / "config.json").write_text(json.dumps(config))
    point = {"split": "validation", "step": 5, "perplexity": perplexity + 1, "train_seconds": 1.0}
    write_jsonl(folder / "metrics.jsonl", [point, point | {"step": 9, "train_seconds": 2.0, "perplexity": perplexity}])
    line = {"split": "test", "step": 9, "perplexity": perplexity, "bits_per_byte": math.log2(perplexity), "seed": seed}
    about = {"corpus": "x", "corpus_hash": "a", "length": 8, "family": "flash", "parameters": 3, "device": "a CPU"}
    write_jsonl(folder / "results.jsonl", [line | about])
    return str(folder)


def result(run: str, seed: int, perplexity: float) -> dict:
    return {"run": run, "seed": seed, "perplexity": perplexity}


GROUPS = {"both": ["b0", "b1", "b2"], "local": ["l0", "l1", "l2"]}


def lines_of(both, local) -> list[dict]:
    names = zip(("b0", "b1", "b2", "l0", "l1", "l2"), (0, 1, 2) * 2, (*both, *local), strict=True)
    return compare_seeds([result(*one) for one in names], GROUPS)


def test_the_interval_of_the_ratio_is_student_s():
    both, local = (50.0, 52.0, 49.0), (55.0, 56.5, 55.5)
    first, second = lines_of(both, local)
    assert "ratio" not in first and first["perplexity"] == pytest.approx(np.prod(both) ** (1 / 3))
    interval = ttest_1samp(np.log(local) - np.log(both), 0).confidence_interval(0.95)
    assert (second["from"], second["to"]) == pytest.approx(np.exp([interval.low, interval.high]))
    assert second["verdict"] == "worse" and second["lowest"] == 55.0


@pytest.mark.parametrize(("local", "verdict"), [((40.0, 41.0, 39.5), "better"), ((60.0, 40.0, 50.0), "undecided")])
def test_a_verdict_needs_an_interval_on_one_side(local, verdict):
    assert lines_of((50.0, 52.0, 49.0), local)[1]["verdict"] == verdict


def test_two_seeds_are_too_few_for_a_verdict_and_one_for_an_interval():
    results = [result("b0", 0, 50.0), result("b1", 1, 51.0), result("l0", 0, 20.0), result("l1", 1, 20.5)]
    two = compare_seeds(results, {"both": ["b0", "b1"], "local": ["l0", "l1"]})[1]
    assert two["verdict"] == "undecided: 2 of 3 seeds" and two["to"] > two["from"]
    one = compare_seeds(results, {"both": ["b0", "b1"], "local": ["l0"]})[1]
    assert one["verdict"] == "undecided: 1 of 3 seeds" and "from" not in one and one["ratio"] == pytest.approx(0.4)
    none = compare_seeds(results, {"both": ["b0"], "local": ["l1"]})[1]
    assert none["verdict"] == "no seed in common"
    assert "undecided: 2 of 3 seeds" in seed_table([{"model": "both"}, two])


def test_runs_that_differ_only_in_their_seed_share_a_curve_and_a_row(tmp_path):
    runs = [scored(tmp_path / f"both,seed={seed}", seed, 50.0 + seed) for seed in range(3)]
    runs += [scored(tmp_path / f"wide,seed={seed}", seed, 40.0 + seed, model_dim=256) for seed in range(3)]
    names = {name.workdir.name: name for name in map(run_name, runs)}
    groups = group_seeds(names, [result(label, i % 3, 1.0) for i, label in enumerate(names)])
    assert groups == {"both": list(names)[:3], "wide": list(names)[3:]}
    text = write_comparison(runs, "test", tmp_path / "out")
    assert "ratio to both" in text and "| better" in text
    assert [line["model"] for line in read_jsonl(tmp_path / "out" / "seeds.jsonl")] == ["both", "wide"]


def test_groups_have_names_of_their_own(tmp_path):
    """Also where nothing is left without the seed, or two groups would be called alike."""
    runs = [
        scored(tmp_path / place, seed, 9.0, model_dim=dim)
        for place, seed, dim in (
            ("seed0", 0, 64),
            ("seed1", 1, 64),
            ("a/x,seed=0", 0, 32),
            ("a/x,seed=1", 1, 32),
            ("b/x,seed=0", 0, 16),
            ("b/x,seed=1", 1, 16),
        )
    ]
    names = labels(runs)
    groups = group_seeds(names, [result(label, i % 2, 1.0) for i, label in enumerate(names)])
    assert [len(alike) for alike in groups.values()] == [2, 2, 2] and all(groups)
    assert "seed0, seed1" in groups
