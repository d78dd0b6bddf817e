"""Tuning by successive halving on synthetic losses with a known optimum; and one search that trains."""

import json
import math

import pytest
from small import override_flags, small_config, write_corpus

from flash_lm import sweep
from flash_lm.cli.types import count
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.configs import quickstart
from flash_lm.errors import InputError
from flash_lm.report.tuning import write_tuning
from flash_lm.runs.jsonl import append_jsonl, read_jsonl
from flash_lm.sweeps import tuning
from flash_lm.sweeps.tuning import best_values, tune

pytestmark = pytest.mark.usefixtures("usual_promotion")

BUDGET = 400_000


def make_config(rate):
    config = quickstart.get_config()
    # Enough tokens for eight devices.
    return apply_changes(config, {"train.learning_rate": rate, "data.tokens_per_batch": 4096})


@pytest.fixture
def synthetic_losses(monkeypatch):
    """Runs whose loss is a parabola in the logarithm of the rate; the best rate falls as tokens grow."""
    best, diverges, made = {}, {}, []

    def run_study(config, runs, workdir, split, should_stop, vmap):
        failures = {}
        for name, changes in runs.items():
            family, rate, tokens = changes["model.family"], changes["train.learning_rate"], changes["train.tokens"]
            steps = parse(apply_changes(config, changes)).train.steps
            if (workdir / name / "results.jsonl").exists():
                continue
            made.append(name)
            if rate > diverges.get(family, math.inf):
                failures[name] = "loss nan"
                continue
            loss = 3 + math.log2(rate / best[family] * (tokens / BUDGET) ** 0.25) ** 2 / 100
            append_jsonl(workdir / name / "results.jsonl", [{"split": split, "loss": loss, "step": steps, "seed": 0}])
        return failures

    monkeypatch.setattr(tuning, "run_study", run_study)
    return best, diverges, made


@pytest.mark.parametrize("true", [1e-4, 7e-4, 3e-3, 1e-2, 0.2])
def test_the_optimal_rate_is_selected(synthetic_losses, tmp_path, true):
    """To the nearest of the values, a factor of two apart; the grid grows as far as it must."""
    synthetic_losses[0]["flash"] = true
    lines = tune(make_config(3e-3), {"f": {"model.family": "flash"}}, "train.learning_rate", BUDGET, tmp_path, bool)
    (best,) = best_values(lines)
    assert abs(math.log2(best["value"] / true)) <= 0.51
    assert best["bracketed"] and best["tokens"] == BUDGET
    assert best["grown"] == (not 0.76e-3 < best["value"] < 11.9e-3)  # limits of the first grid
    in_rounds = [sum(line["round"] == number for line in lines) for number in (1, 2, 3)]
    assert in_rounds[0] >= 5 and 3 <= in_rounds[2] <= in_rounds[1] + 2
    losses = {line["value"]: line["loss"] for line in lines if line["round"] == 3}
    assert losses[best["value"]] == min(losses.values())


def test_shorter_runs_have_shorter_decays(synthetic_losses, tmp_path, monkeypatch):
    synthetic_losses[0]["flash"], asked, real = 3e-3, [], tuning.run_study

    def record_decays(config, runs, *rest, **options):
        asked.extend((changes["train.tokens"], changes["train.decay_steps"]) for changes in runs.values())
        return real(config, runs, *rest, **options)

    monkeypatch.setattr(tuning, "run_study", record_decays)
    config = apply_changes(make_config(3e-3), {"train.schedule": "sqrt", "train.decay_steps": 20})
    tune(config, {"f": {"model.family": "flash"}}, "train.learning_rate", BUDGET, tmp_path, bool)
    assert set(asked) == {(BUDGET // 4, 5), (BUDGET // 2, 10), (BUDGET, 20)}


def test_values_that_diverge_lose(synthetic_losses, tmp_path):
    best, diverges, _ = synthetic_losses
    best["flash"], diverges["flash"] = 1e-2, 4e-3
    lines = tune(make_config(3e-3), {"f": {"model.family": "flash"}}, "train.learning_rate", BUDGET, tmp_path, bool)
    (selected,) = best_values(lines)
    assert selected["value"] == 3e-3 and selected["bracketed"]
    text = write_tuning(lines, best_values(lines), tmp_path)
    assert "not finite" in text and (tmp_path / "tuning.png").stat().st_size > 10_000


def test_a_search_goes_on_where_it_stopped(synthetic_losses, tmp_path):
    best, _, made = synthetic_losses
    best.update(flash=2e-3, gla=6e-3)
    models = {name: {"model.family": name} for name in best}
    asked = iter([False] * 3 + [True])
    with pytest.raises(KeyboardInterrupt):
        tune(make_config(3e-3), models, "train.learning_rate", BUDGET, tmp_path, lambda: next(asked))
    lines = tune(make_config(3e-3), models, "train.learning_rate", BUDGET, tmp_path, bool)
    assert len(made) == len(set(made)) == len(lines) == len(read_jsonl(tmp_path / "tuning.jsonl"))
    text = write_tuning(lines, best_values(lines), tmp_path)
    assert text in (tmp_path / "table.md").read_text() and "|     0.0015 |" in text and "|      0.006 |" in text
    assert [line["model"] for line in read_jsonl(tmp_path / "best.jsonl")] == ["flash", "gla"]


def test_a_grid_at_its_limit_is_reported(synthetic_losses, tmp_path):
    synthetic_losses[0]["flash"] = 1e3
    lines = tune(make_config(3e-3), {"f": {"model.family": "flash"}}, "train.learning_rate", BUDGET, tmp_path, bool)
    (best,) = best_values(lines)
    assert not best["bracketed"] and best["grown"]
    assert "no best value: the grid ends here" in write_tuning(lines, best_values(lines), tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tune=train.learning_rte", "--budget=2M"], "train.learning_rte: there is no such key"),
        (["--tune=train.steps", "--budget=2M"], "is not a number above 0"),
        (["--tune=train.end_learning_rate", "--budget=2M"], "and 0.0 is not a number above 0"),
        (["--tune=train.learning_rate", "--budget=1000"], "needs 10 steps, so give at least 163840"),
        (["--tune=train.learning_rate"], "--tune and --budget go together"),
        (["--tune=train.learning_rate", "--budget=2M", "--split=test"], "leave --split and --lengths"),
        (["--tune=train.learning_rate", "--budget=2M", "--grid=model.family=flsh"], "flsh"),
    ],
)
def test_invalid_searches_are_refused_and_write_nothing(tmp_path, words, message):
    overrides = ["--config.data.tokens_per_batch=4096"]
    with pytest.raises(InputError, match=message):
        sweep.main(["--config=configs/quickstart.py", f"--workdir={tmp_path / 'out'}", *words, *overrides])
    assert not (tmp_path / "out").exists()


def test_counts_may_have_a_factor():
    assert [count(word) for word in ("200", "200k", "1.5M", "2_000", "1e6", "3G")] == [
        200, 200_000, 1_500_000, 2000, 10**6, 3 * 10**9,
    ]  # fmt: skip
    for word in ("", "k", "0", "-1", "0.1", "many", "inf"):
        with pytest.raises(sweep.argparse.ArgumentTypeError, match="is not a positive number"):
            count(word)


@pytest.mark.slow("trains the runs of a search")
def test_a_search_trains_its_runs(tmp_path, capsys):
    config = small_config(write_corpus(tmp_path / "corpus"), tmp_path)
    words = ["--tune=train.learning_rate", "--budget=10240", "--grid=model.family=transformer,linear_transformer"]
    overrides = override_flags(config)
    sweep.main(["--config=configs/quickstart.py", f"--workdir={tmp_path / 'out'}", *words, *overrides])
    lines = read_jsonl(tmp_path / "out" / "tuning.jsonl")
    for line in lines:
        (result,) = read_jsonl(tmp_path / "out" / line["run"] / "results.jsonl")
        assert line["loss"] == result["loss"] and line["step"] == line["tokens"] / 256
        saved = json.loads((tmp_path / "out" / line["run"] / "config.json").read_text())
        assert saved["train"]["learning_rate"] == line["value"]
    assert "family=linear_transformer" in capsys.readouterr().out
    assert (tmp_path / "out" / "tuning.png").exists()
