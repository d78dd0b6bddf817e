"""Training on labels: the model learns, stops at its goal, is scored, and starts from a model of the same text."""

import json
import re
import shutil

import numpy as np
import pytest
from data.test_images import write_labels
from data.test_labelled import write
from small import command, finish, small_config

import flash_lm
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.inference.export import export
from flash_lm.inference.model import load_model
from flash_lm.inference.scoring import evaluate
from flash_lm.report.comparison import write_comparison
from flash_lm.runs.jsonl import append_jsonl, read_jsonl
from flash_lm.sweeps.grid import is_done, resolve_workdir, run_study
from flash_lm.training.label_scores import wilson
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import train
from studies.lra import models
from training.runs import losses

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory, usual_promotion):
    """Texts of twelve letters; the label says whether they contain an x."""
    folder, draw = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)

    def split(count):
        texts = ["".join(draw.choice(list("abcd"), 12)) for _ in range(count)]
        labels = [bool(draw.integers(2)) for _ in texts]
        texts = [text[:5] + ("x" if label else "a") + text[6:] for text, label in zip(texts, labels, strict=True)]
        return texts, ["with" if label else "without" for label in labels]

    write(folder / "data", {"train": split(400), "validation": split(40), "test": split(40)})
    config = small_config(str(folder / "data"), folder / "cache")
    config.task = "classify"
    config.data.update(corpus="hf", label_column="label", length=16)
    config.model.dropout = 0.0
    config.train.update(steps=120, warmup_steps=10, eval_every=20, checkpoint_every=0, stop_accuracy=0.99)
    return config


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "run"
    train(config, workdir)
    return workdir


def test_it_learns_and_stops_at_its_goal(config, run, capsys):
    validation = [line for line in read_jsonl(run / "metrics.jsonl") if line["split"] == "validation"]
    assert validation[-1]["accuracy"] >= 0.99 and all(line["accuracy"] < 0.99 for line in validation[:-1])
    assert validation[-1]["step"] < 120 and "bits_per_byte" not in validation[-1]
    assert json.loads((run / "labels.json").read_text()) == ["with", "without"]
    before = losses(run)
    train(config, run)  # again: nothing is left to do
    assert f"train.stop_accuracy=0.99 was reached at step {validation[-1]['step']}" in capsys.readouterr().out
    assert losses(run) == before


@pytest.mark.slow("scores a run")
def test_its_score_has_an_interval_and_the_most_frequent_label(run):
    (result,) = evaluate(run, "test")
    assert result["tokens"] == 40 and result["accuracy"] > 0.9 and result["reached"] >= 0.99
    assert (result["accuracy_low"], result["accuracy_high"]) == wilson(result["accuracy"] * 40, 40)
    assert result["macro_f1_low"] <= result["macro_f1"] <= result["macro_f1_high"] and "confusion" not in result
    assert 0.8 < result["matthews"] <= 1
    labels = np.bincount([_label(run, i) for i in range(40)])
    assert result["majority"] == labels.max() / 40
    assert "bits_per_byte" not in result and "word_perplexity" not in result
    append_jsonl(run / "results.jsonl", [result])
    assert is_done(run, "test", 120, [16], goal=0.99)
    assert not is_done(run, "test", 120, [16]) and not is_done(run, "test", 120, [16], goal=1.1)


@pytest.mark.slow("trains and scores three runs")
def test_a_sweep_pretrains_and_then_trains_on_labels(config, tmp_path):
    """As in the sweeps of studies/lra: pretraining on the task's rows first, and each run is scored."""
    pretrain_runs = models.runs(masked=0.3)
    runs = resolve_workdir(
        {name: pretrain_runs[name] for name in pretrain_runs if name.startswith("linear_transformer")}, tmp_path
    )
    short = apply_changes(config, {"train.steps": 2, "train.warmup_steps": 1, "train.stop_accuracy": None})
    assert run_study(short, runs, tmp_path, "test", lambda: False) == {}
    scores = {name: read_jsonl(tmp_path / name / "results.jsonl")[-1] for name in runs}
    assert [line["task"] for line in scores.values()] == ["classify", "masked_lm", "classify"]
    assert scores["linear_transformer_pretrained"]["parent_run"].endswith("linear_transformer_masked")
    assert "parent_run" not in scores["linear_transformer_scratch"]
    for name, line in scores.items():
        assert ("majority" in line) == (line["task"] == "classify"), name


def test_truncated_texts_are_reported(run):
    (result,) = evaluate(run, "test", [8])
    assert result["cut"] == 1.0 and result["length"] == 8


def test_its_table_has_the_most_frequent_label_and_ranks_by_accuracy(run, tmp_path):
    worse = tmp_path / "worse"
    shutil.copytree(run, worse, ignore=shutil.ignore_patterns("checkpoints", "results.jsonl"))
    (line,) = evaluate(run, "test")
    append_jsonl(run / "results.jsonl", [line])
    append_jsonl(worse / "results.jsonl", [line | {"accuracy": 0.5, "loss": 0.0}])
    text = write_comparison([worse, run], "test", tmp_path / "out")
    assert text and "most frequent label" in text and text.index("| run ") < text.index("| worse ")
    assert (tmp_path / "out" / "accuracy.png").exists()


def _label(run, number):
    from flash_lm.data.labelled import LabelledRows  # noqa: PLC0415
    from flash_lm.data.splits import load_splits  # noqa: PLC0415

    config = load_model(run).config
    return int(LabelledRows(load_splits(config.data).splits["test"], 16, 1)[number]["targets_BxL"][0])


@pytest.mark.slow("starts a process that scores a run")
def test_the_command_reports_truncated_texts(run):
    out, _ = finish(command("flash_lm.evaluate", f"--workdir={run}", f"--results={run}/other.jsonl"))
    assert "cut at their end" not in out  # 14 tokens fit
    assert "at length 16" in out and "over 40 rows; the most frequent label is" in out and "(95 %: " in out


@pytest.mark.slow("exports a run, and compiles the exported model as well as that of the run")
def test_an_export_knows_its_labels(run, tmp_path):
    append_jsonl(run / "results.jsonl", evaluate(run, "test"))
    export(load_model(run), tmp_path / "export", "apache-2.0")
    card = (tmp_path / "export" / "README.md").read_text()
    assert "A classifier into 2 labels, of family" in card and "perplexity" not in card
    assert re.search(r"\| accuracy [\d.]+, macro F1 [\d.]+, Matthews' correlation [\d.]+, share of the most ", card)
    assert flash_lm.load(run).classify([]) == []
    with pytest.raises(InputError, match="takes a list of texts"):
        flash_lm.load(run).classify("abc")
    exported, trained = (
        flash_lm.load(x).classify(["abcdaxbcdabc", "abcdaabcdabc"]) for x in (tmp_path / "export", run)
    )
    assert [max(row, key=row.get) for row in trained] == ["with", "without"] and trained == exported
    assert all(sum(row.values()) == pytest.approx(1, abs=1e-5) for row in trained)


@pytest.mark.slow("trains two runs for each task")
@pytest.mark.parametrize("task", ["masked_lm", "causal_lm"])
def test_it_starts_from_a_model_of_the_same_text(config, tmp_path, task):
    keys = {"task": task, "train.steps": 4, "train.warmup_steps": 1, "train.stop_accuracy": None}
    train(apply_changes(config, keys), tmp_path / "parent")
    causal = {"model.causal": True, "model.classes.pool": "last"} if task == "causal_lm" else {}
    child = {"train.init_from": str(tmp_path / "parent"), "train.steps": 2, "train.warmup_steps": 1}
    train(apply_changes(config, child | causal), tmp_path / "child")
    parent, first = (flash_lm.load(x).params for x in (tmp_path / "parent", f"{tmp_path / 'child'}@0"))
    assert "classifier" in first and "classifier" not in parent
    np.testing.assert_array_equal(first["embedding"], parent["embedding"])


@pytest.mark.slow("trains a run for 20 more steps, and scores it")
def test_a_branch_of_a_run_that_reached_its_goal_goes_on(config, run, tmp_path):
    step = load_model(run).step
    keys = {"train.branch_from": str(run), "train.steps": step + 20, "train.warmup_steps": 1}
    train(apply_changes(config, keys), tmp_path / "branch")
    (line,) = evaluate(tmp_path / "branch", "test")
    assert line["step"] > step


@pytest.mark.slow("trains another run")
def test_a_classifier_of_other_labels_gives_everything_except_its_head(config, run, tmp_path):
    folder = write(tmp_path / "data", {"train": (["ab", "cd"] * 20, ["x", "y"] * 20)})
    keys = {"data.path": str(folder), "train.init_from": str(run), "train.steps": 2, "train.warmup_steps": 1}
    train(apply_changes(config, keys | {"train.stop_accuracy": None}), tmp_path / "other")
    parent, first = (flash_lm.load(x).params for x in (run, f"{tmp_path / 'other'}@0"))
    np.testing.assert_array_equal(first["embedding"], parent["embedding"])
    assert not np.array_equal(first["classifier"]["map"]["kernel"], parent["classifier"]["map"]["kernel"])


@pytest.mark.slow("trains and scores a run for each corpus")
@pytest.mark.parametrize("corpus", ["listops", "images"])
def test_examples_with_labels_are_masked_too(tmp_path, corpus):
    """For pretraining on the rows of the task."""
    config = small_config(str(write_labels(tmp_path)), tmp_path / "cache")
    config.task = "masked_lm"
    config.data.update(corpus=corpus, pack="examples", length=32)
    config.data.masking.rate = 0.5
    config.data.listops.update(longer_than=8, shorter_than=32, train=64, test=16)
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    train(config, tmp_path / "masked")
    (line,) = evaluate(tmp_path / "masked", "test")
    assert np.isfinite(line["loss"]) and line["tokens"] > 8


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"model.head": "softmax"}, "task=classify does not go with model.head=softmax"),
        ({"task": "causal_lm", "model.head": "classes"}, "task=causal_lm does not go with model.head=classes"),
        ({"train.best_metric": "bits_per_byte"}, "task=classify has no bits_per_byte"),
        ({"data.label_column": "text"}, "data.label_column and data.text_column are both text"),
    ],
)
def test_settings_that_exclude_each_other(config, keys, expected):
    with pytest.raises(InputError, match=expected):
        build_experiment(parse(apply_changes(config, keys)))


def test_more_labels_than_outputs(config, tmp_path):
    folder = write(
        tmp_path, {split: (["ab", "cd", "ef"], ["x", "y", "z"]) for split in ("train", "validation", "test")}
    )
    with pytest.raises(InputError, match="the corpus has 3 labels, but got model.classes.count=2: leave it open"):
        build_experiment(parse(apply_changes(config, {"data.path": str(folder), "model.classes.count": 2})))


def test_a_classifier_does_not_generate(run):
    with pytest.raises(InputError, match="classify"):
        flash_lm.load(run).generate("abc")
