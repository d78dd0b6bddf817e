"""The recall study: its runs, resuming, its table and its picture."""

import pathlib

import pytest
from small import ROOT

from flash_lm.config.changes import apply_changes
from flash_lm.configs.base import get_config
from flash_lm.configs.recall import mqar
from flash_lm.errors import InputError
from flash_lm.models.facts import facts
from flash_lm.report.recall import plot_recall, recall_table
from flash_lm.sweeps.jobs import JobFolder, make_jobs, read_job_lines
from flash_lm.sweeps.recall import list_jobs, list_models, selection_loss, summarize, time_decoding
from studies.recall.configs import mqar_as_measured, mqar_longer

pytestmark = pytest.mark.usefixtures("usual_promotion")


def small():
    parts = ((16, 2, 64), (16, 4, 64))
    keys = {"words": 32, "train": parts, "validation": ((16, 2, 8),), "test": ((16, 2, 8), (16, 4, 24))}
    config = apply_changes(mqar_as_measured.get_config(), {f"data.mqar.{key}": x for key, x in keys.items()})
    config.model.update(max_length=16, num_layers=1, num_heads=1)
    config.data.tokens_per_batch = 8 * 16
    config.train.update(steps=2, warmup_steps=1, eval_every=0)
    return config


def run_line(model, rate, seed, accuracy, validation, **more):
    line = {"model": model, "width": 8, "rate": rate, "seed": seed, "accuracy": accuracy, "step": 10 * seed}
    scores = {"validation_accuracy": validation, "by_part": {"2 pairs": accuracy}, "state_bytes": 64, "parameters": 9}
    return line | scores | more


@pytest.mark.parametrize(("study", "name"), [(mqar_longer, "longer"), (mqar_as_measured, "mqar")])
def test_recorded_runs_are_of_the_config_that_their_command_names(study, name):
    """So the command continues with the lines, and neither refuses them nor makes others."""
    out = ROOT / "studies" / "recall" / "results" / name
    models, further = list_models(study.get_config(), study.MODELS, study.WIDTHS), getattr(study, "MORE_RATES", 0)
    jobs = list_jobs(models, study.RATES, study.MORE_SEEDS, further, out)
    job_folder = JobFolder(out, pathlib.Path(), bool)
    made = [line for job in jobs for line in job_folder.lines(job)]  # or it raises
    assert len(made) == len(read_job_lines(out)) > 20 and all(line in made for line in read_job_lines(out))
    if name == "mqar":
        assert len(made) == len(jobs)  # nothing is missing


def test_the_config_of_the_page_is_of_todays_defaults():
    """The page trains it first: everything except size and convolution is left to the family."""
    config, base = mqar.get_config().model, get_config().model
    sizes = {"family", "num_layers", "model_dim", "num_heads", "max_length", "gau", "chunks", "window", "linear"}
    apply_changes = {key for key in config if config[key] != base[key]}
    assert apply_changes <= sizes | {"short_convolution"} and config.short_convolution


@pytest.mark.slow("trains the runs of a study")
def test_a_study_goes_on_where_it_stopped(tmp_path):
    models = list_models(small(), ("linear_transformer+short_convolution=2",), (8,))
    out, runs = tmp_path / "out", tmp_path / "runs"
    study = lambda models, stop: make_jobs(
        lambda: list_jobs(models, (1e-3, 1e-2), (1,), 0, out), JobFolder(out, runs, stop)
    )
    with pytest.raises(KeyboardInterrupt):
        study(models, lambda: bool(read_job_lines(out)))  # in the second run
    before = read_job_lines(out)
    assert [(line["rate"], line["seed"]) for line in before] == [(1e-3, 0)]
    assert study(models, bool) == []
    lines = read_job_lines(out)
    assert all(line in lines for line in before)
    rate = min((line for line in lines if line["seed"] == 0), key=selection_loss)["rate"]
    assert {(line["rate"], line["seed"]) for line in lines} == {(1e-3, 0), (1e-2, 0), (rate, 1)}
    assert not [path for path in runs.iterdir() if path.is_dir()]  # a line has all that is reported
    for line in lines:
        parts, targets = line["by_part"], {"2 pairs in 16 tokens": 16, "4 pairs in 16 tokens": 96}
        assert line["accuracy"] == pytest.approx(sum(parts[x] * n for x, n in targets.items()) / 112)
        assert line["targets"] == 112 and line["step"] == 2
    config = apply_changes(small(), {"model.model_dim": 8, "model.short_convolution": 2, "model.vocab_size": 32})
    expected = facts("linear_transformer", config.model, (16,), ()).state_bytes[16]
    assert {line["state_bytes"] for line in lines} == {expected}
    other = list_models(apply_changes(small(), {"train.clip": 0.5}), ("linear_transformer+short_convolution=2",), (8,))
    with pytest.raises(InputError, match="linear_transformer.* is of another config"):
        study(other, bool)


@pytest.mark.slow("compiles a step of each model")
def test_times_are_of_each_model():
    lines = time_decoding(list_models(small(), ("aft_simple",), (8, 16)), rounds=1)
    assert [(line["model"], line["width"], line["context"]) for line in lines] == [
        ("aft_simple", 8, 16),
        ("aft_simple", 16, 16),
    ]
    assert all(line["ms_a_token"] > 0 for line in lines)


def test_the_summary_is_of_the_best_rate(tmp_path):
    runs = [
        run_line("a", 1e-3, 0, 0.9, 0.2),
        run_line("a", 1e-2, 0, 0.5, 0.6),  # the best in validation counts, not in the test
        run_line("a", 1e-2, 1, 0.7, 0.9),
        run_line("a", 1e-2, 2, 0.6, 0.1),
        {"model": "b", "width": 8, "rate": 1e-3, "seed": 0, "failed": "not finite"},
        run_line("c", 1e-3, 0, 0.8, 0.8),
    ]
    lines = summarize(runs, [{"model": "a", "width": 8, "ms_a_token": 1.5}])
    assert [line["model"] for line in lines] == ["a", "b", "c"]
    assert [line["failed"] for line in lines] == [0, 1, 0] and "accuracy" not in lines[1]
    first = lines[0]
    assert (first["rate"], first["seeds"], first["accuracy"], first["lowest"], first["highest"]) == (
        1e-2,
        3,
        0.6,
        0.5,
        0.7,
    )
    assert first["ms_a_token"] == 1.5 and "ms_a_token" not in lines[2]
    table = recall_table(lines)
    assert table.index("| c ") < table.index("| a ") and "80.0%" in table
    plot_recall(lines, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").stat().st_size > 10_000


@pytest.mark.slow("builds each model")
def test_the_presets_models_can_be_built():
    measured = mqar_as_measured
    names = {model.name for model in list_models(measured.get_config(), measured.MODELS, measured.WIDTHS)}
    assert len(names) == 18 and sum("short_convolution" in name for name in names) == 11
    for model in list_models(measured.get_config(), measured.MODELS, (32,)):
        sizes = facts(model.family, model.config.model, (128,), ())
        assert sizes.state_bytes[128] > 0
