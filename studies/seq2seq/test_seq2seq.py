"""The study of prefixes and encoders: its models, its runs, and verdicts on planted ones."""

import math
import pathlib

import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx
from small import ROOT

from flash_lm import build_model
from flash_lm.cli.load import load_module
from flash_lm.config.changes import apply_changes
from flash_lm.errors import InputError
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.sweeps.jobs import JobFolder, read_job_lines
from flash_lm.sweeps.rates import rate_and_seed_jobs
from studies.seq2seq import __main__ as seq2seq_program
from studies.seq2seq import data
from studies.seq2seq.configs import copy, couplets
from studies.seq2seq.report import Comparison, selection_loss, summarize
from studies.seq2seq.run import list_models, run_model

STUDIES = ("studies/seq2seq/configs/couplets.py", "studies/seq2seq/configs/copy.py")


def line(model: str, seed: int, perplexity: float, rate: float = 0.1, loss: float | None = None, accuracy=0.5, **more):
    loss = math.log(perplexity) if loss is None else loss
    about = {"step": 100, "parameters": 7, "task": "causal_lm"}
    return {
        "model": model,
        "seed": seed,
        "rate": rate,
        "perplexity": perplexity,
        "accuracy": accuracy,
        "validation_loss": loss,
        **about,
        **more,
    }


def three(model: str, *perplexities: float) -> list[dict]:
    return [line(model, seed, x) for seed, x in enumerate(perplexities)]


def comparison(measure: str, first: str, second: str, margin: float) -> Comparison:
    """Better by a margin, or no worse where it is negative."""
    return Comparison(1, measure, first, "better" if margin > 0 else "no worse", second, abs(margin))


@pytest.mark.parametrize(
    ("margin", "ours", "verdict"),
    [
        (0.02, (97, 97, 97), "holds"),  # 3 % better
        (0.02, (99, 99, 99), "does not hold"),
        (0.02, (97, 97, 99), "undecided"),  # seeds disagree
        (-0.02, (101, 101, 101), "holds"),  # 1 % worse
        (-0.02, (103, 103, 103), "does not hold"),
        (-0.02, (101, 101), "undecided"),  # too few seeds
    ],
)
def test_verdicts_by_perplexity(margin, ours, verdict):
    rule = comparison("perplexity", "a", "b", margin)
    verdict_line = rule.verdict_line(three("a", *ours) + three("b", 100, 100, 100))
    assert verdict_line["verdict"] == verdict
    assert verdict_line["gains"] == pytest.approx({seed: 1 - x / 100 for seed, x in enumerate(ours)})


def test_verdicts_by_accuracy():
    runs = [
        line(model, seed, 2, accuracy=x) for model, x in (("a", 0.9), ("b", 0.7), ("c", 0.995)) for seed in range(3)
    ]
    better = lambda first, second, margin: comparison("accuracy", first, second, margin).verdict_line(runs)["verdict"]
    assert better("a", "b", 0.01) == "holds"
    assert better("b", "a", 0.01) == "does not hold"
    assert better("a", "c", 0.01) == "undecided", "no room above 99.5 %"
    assert better("a", "c", -0.01) == "does not hold"
    assert better("c", "c", -0.01) == "undecided", "two models near 100 %"
    verdict_line = comparison("accuracy", "c", "c", -0.01).verdict_line(runs)
    assert verdict_line["hypothesis"] == "c is at most 1 point of accuracy worse than c"
    assert (verdict_line["figure"], verdict_line["gains"]) == ("accuracies leave no room", {})


def test_only_the_best_rate_counts_and_a_failed_seed_decides_nothing():
    other = line("a", 0, 50, rate=0.3, loss=9.0)  # a better test figure at a rate that validation does not choose
    runs = [other, *three("a", 101, 101, 101), *three("b", 100, 100, 100)]
    rule = comparison("perplexity", "a", "b", -0.02)
    assert rule.verdict_line(runs)["verdict"] == "holds"
    failed = {"model": "a", "seed": 2, "rate": 0.1, "failed": "the loss is nan"}
    assert rule.verdict_line([*runs[:3], failed, *runs[4:]])["verdict"] == "undecided"
    assert rule.verdict_line([])["verdict"] == "not run"
    (first, second) = summarize([*runs[:3], failed, *runs[4:]])
    assert (first["seeds"], first["failed"], first["rate"]) == (2, 1, 0.1)
    assert second["perplexity"] == 100


@pytest.mark.parametrize("study", STUDIES)
def test_models_are_of_about_equal_size(study):
    """The page says: without embeddings within 1 % among Transformers, and among gated units."""
    module, sizes = load_module(study), {}
    for model in list_models(module.get_config(), module.MODELS):
        model.config.model.update(vocab_size=2, causal=True)
        built = nnx.eval_shape(lambda config=model.config.model: build_model(config, rngs=nnx.Rngs(0)))
        outside = 2 * model.config.model.model_dim
        parameters = jax.tree.leaves(nnx.state(built, nnx.Param))
        sizes[model.name] = sum(math.prod(x.shape) for x in parameters) - outside
    for units in (False, True):
        alike = [x for name, x in sizes.items() if ("gau" in name or "quad" in name) == units]
        assert len(alike) > 5 and max(alike) <= 1.01 * min(alike), sizes
    named = {name for rule in module.RULES for name in (rule.first, rule.second)}
    assert named <= sizes.keys()


@pytest.mark.parametrize(
    ("study", "name", "changes"),
    [(copy, "copy", {}), (copy, "reverse", {"data.copy.reverse": True}), (couplets, "couplets", {})],
)
def test_recorded_runs_are_of_the_config_that_their_command_names(study, name, changes):
    """So the command continues with the lines, and neither refuses them nor makes others."""
    out = ROOT / "studies" / "seq2seq" / "results" / name
    lines, models = read_job_lines(out), list_models(apply_changes(study.get_config(), changes), study.MODELS)
    jobs = rate_and_seed_jobs(models, study.RATES, study.MORE_SEEDS, 0, lines, selection_loss, run_model)
    job_folder = JobFolder(out, pathlib.Path(), bool)
    assert len([line for job in jobs for line in job_folder.lines(job)]) == len(lines) == len(jobs) > 20


@pytest.mark.slow("trains the runs of a study")
@pytest.mark.usefixtures("usual_promotion")
def test_the_study_runs_and_goes_on(tmp_path, capsys, monkeypatch):
    script, out = seq2seq_program, tmp_path / "out"
    words = ["--config=studies/seq2seq/configs/copy.py", f"--workdir={tmp_path / 'runs'}", f"--out={out}"]
    words += ["--config.train.steps=3", "--config.data.copy.reverse=True"]
    chosen = lambda config, keys: [
        x for x in list_models(config, keys) if x.name in ("flash_quad", "flash_quad_prefix")
    ]
    monkeypatch.setattr(script, "list_models", chosen)
    script.main(words)
    lines = sorted(read_jsonl(out / "runs.jsonl"), key=lambda line: (line["model"], line["seed"]))
    assert [(x["model"], x["seed"]) for x in lines] == [
        (model, seed) for model in ("flash_quad", "flash_quad_prefix") for seed in (0, 0, 0, 1, 2)
    ]
    assert all(x["step"] == 3 and x["tokens"] == lines[0]["tokens"] for x in lines)
    assert [x["task"] for x in lines] == ["causal_lm"] * 5 + ["prefix_lm"] * 5
    assert {path.name for path in out.iterdir()} >= {"table.md", "verdicts.jsonl", "summary.jsonl", "seq2seq.png"}
    (about_prefix,) = [x for x in read_jsonl(out / "verdicts.jsonl") if x["number"] == 2]
    assert about_prefix["verdict"] in ("holds", "does not hold", "undecided") and len(about_prefix["gains"]) == 3
    assert not [path for path in (tmp_path / "runs").iterdir() if path.is_dir()], "weights are gone"

    capsys.readouterr()
    script.main(words)
    assert {*map(str, read_jsonl(out / "runs.jsonl"))} == {*map(str, lines)}
    with pytest.raises(InputError, match="is of another config, rate, texts or scores: write to another folder"):
        script.main([*words, "--config.train.clip=0.1"])


def test_couplets_of_frequent_characters(tmp_path, capsys):
    """Characters are counted in the training split, those of both lines."""
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    table = lambda *pairs: pa.table({"first": [a for a, _ in pairs], "second": [b for _, b in pairs]})
    pq.write_table(table(("ab", "aa"), ("bc", "ca"), ("ad", "ba")), corpus / "train.parquet")
    pq.write_table(table(("ac", "cc"), ("ba", "ad"), ("cb", "ab")), corpus / "test.parquet")
    data.main([str(corpus), f"--out={out}", "--characters=3"])
    assert pq.read_table(out / "train.parquet").equals(table(("ab", "aa"), ("bc", "ca")))
    assert pq.read_table(out / "test.parquet").equals(table(("ac", "cc"), ("cb", "ab")))
    assert "train.parquet: 2 of 3 couplets" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"has no couplets: expected train.parquet with columns first and second"):
        data.main([str(tmp_path), f"--out={out}"])
