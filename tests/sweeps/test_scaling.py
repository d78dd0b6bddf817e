"""Plans of scaling studies have the FLOPs that they say, and a fit of their results gives the law back."""

import numpy as np
import pytest

from flash_lm import scaling as scaling_program
from flash_lm.cli.load import load_config, load_module
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.models.facts import training_flops
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.sweeps.scaling_law import Law
from flash_lm.training.train_state import ModelFunction

PLAN = ["plan", "--config=quickstart", "--families=flash transformer_plus_plus", "--config.model.vocab_size=2048"]


def test_a_plan_is_a_sweep_of_its_budgets(tmp_path, capsys):
    file = tmp_path / "planned.py"
    scaling_program.main([*PLAN, "--budgets=1e13", f"--out={file}"])
    module = load_module(str(file))
    config, runs = module.get_config(), module.get_runs(module.get_config())
    assert config.model.vocab_size == 2048 and len({x["model.family"] for x in runs.values()}) == 2
    for name, changes in runs.items():
        run = parse(apply_changes(config, changes))
        model = ModelFunction(complete(run.model), seed=0)
        flops = training_flops(model.abstract, changes["train.tokens"], run.data.length)
        assert np.isclose(flops, 1e13, rtol=1e-4), name
        assert 4 <= changes["train.tokens"] / model.parameter_count() <= 100
        assert run.train.steps == -(-changes["train.tokens"] // run.data.tokens_per_batch)
    assert "FLOPs in" in capsys.readouterr().out


def test_near_budgets_have_different_runs(tmp_path, capsys):
    file = tmp_path / "planned.py"
    scaling_program.main([*PLAN, "--budgets=1e13,1.4e13", f"--out={file}"])
    module = load_module(str(file))
    assert f"in {len(module.RUNS)} runs" in capsys.readouterr().out
    assert len({x["train.tokens"] for x in module.RUNS.values()}) == len(module.RUNS)


def test_a_fit_gives_the_law_of_each_family(tmp_path):
    laws = {"flash": Law(1.5, 300.0, 900.0, 0.32, 0.34), "gla": Law(1.7, 500.0, 900.0, 0.36, 0.3)}
    for family, law in laws.items():
        for n in np.geomspace(2e5, 5e6, 5):
            for steps in (500, 2000, 8000, 32000):
                loss = float(law(n, steps * 2048))
                at = {"family": family, "parameters": n, "batch_tokens": 2048, "length": 128, "trained_length": 128}
                line = at | {"step": steps, "split": "test", "loss": loss}
                others = [{"split": "validation"}, {"length": 256}, {"ema": True}, {"step": steps // 2}]
                folder = tmp_path / f"{family}_{n:g}_{steps}"
                folder.mkdir()
                write_jsonl(folder / "results.jsonl", [*(line | other | {"loss": 9.0} for other in others), line])
    scaling_program.main(["fit", *map(str, tmp_path.iterdir()), f"--out={tmp_path}"])
    lines = {line["family"]: line for line in read_jsonl(tmp_path / "law.jsonl")}
    for family, law in laws.items():
        assert np.isclose(lines[family]["alpha"], law.alpha, rtol=0.03)
        assert np.isclose(lines[family]["exponent"], law.exponent, atol=0.01)
        assert np.allclose([lines[family]["E_low"], lines[family]["E_high"]], law.E, rtol=0.02), "no noise, no width"
    assert "gla" in (tmp_path / "law.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*PLAN, "--budgets=many", "--out={tmp}/x.py"], "must be numbers such as 1e13"),
        ([*PLAN, "--budgets=1", "--out={tmp}/x.py"], "no size has 4 to 100 tokens a parameter"),
        ([*PLAN[:3], "--budgets=1e13", "--out={tmp}/x.py"], "set --config.model.vocab_size"),
        (["fit", "{tmp}", "--out={tmp}"], "flash, 1 runs: the fit needs 6 runs or more"),
        (
            ["fit", "{tmp}", "--split=validation", "--out={tmp}"],
            "none of the runs has a result on the validation split",
        ),
    ],
)
def test_what_cannot_be_planned_or_fitted_is_refused(tmp_path, words, message):
    one = {"family": "flash", "parameters": 7, "step": 1, "batch_tokens": 2, "loss": 3.0, "split": "test"}
    write_jsonl(tmp_path / "results.jsonl", [one])
    with pytest.raises(InputError, match=message):
        scaling_program.main([word.format(tmp=tmp_path) for word in words])
    assert not (tmp_path / "x.py").exists() and not (tmp_path / "law.md").exists()
    assert load_config("quickstart", []).model.family
