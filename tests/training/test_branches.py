"""Branches: a new run continues the state, step and data order of another run."""

import json
import shutil

import numpy as np
import pytest
from small import write_corpus

from flash_lm.config.changes import apply_changes
from flash_lm.data import hugging_face, streaming
from flash_lm.errors import InputError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training import resume
from flash_lm.training.train_loop import train
from training.runs import losses, small_run, stop_after

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def constant_run(config, tmp_path_factory):
    """A config whose schedule does not depend on the number of steps, and its run of 6 steps."""
    parent = apply_changes(config, {"train.schedule": "constant", "train.steps": 6, "train.eval_every": 2})
    workdir = tmp_path_factory.mktemp("runs") / "parent"
    train(parent, workdir)
    return parent, workdir


@pytest.mark.slow("trains a branch twice")
def test_a_branch_that_was_started_twice_resumes_the_second_start(constant_run, tmp_path, monkeypatch):
    """Another process trains between the check of the folder and its lock."""
    config, parent = constant_run
    branch = apply_changes(config, {"train.steps": 8, "train.branch_from": str(parent), "train.eval_every": 0})
    train(branch, tmp_path / "other", should_stop=stop_after(1))
    lock = resume.lock_folder

    def copy_and_lock(workdir):
        shutil.copytree(tmp_path / "other", tmp_path / "run")
        return lock(workdir)

    monkeypatch.setattr(resume, "lock_folder", copy_and_lock)
    before = read_jsonl(tmp_path / "other" / "metrics.jsonl")
    train(branch, tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert lines[: len(before)] == before and [line["step"] for line in lines if line["split"] == "train"] == [7, 8]


@pytest.mark.slow("trains three runs, and scores two of them")
def test_a_branch_continues_exactly(constant_run, tmp_path):
    """State, step and data order continue to the bit. The branch records its parent, and no longer needs it."""
    config, workdir = constant_run
    parent = shutil.copytree(workdir, tmp_path / "parent")
    train(apply_changes(config, {"train.steps": 9}), tmp_path / "uninterrupted")
    branch = apply_changes(config, {"train.steps": 9, "train.branch_from": f"{parent}@6"})
    train(branch, tmp_path / "branch", should_stop=stop_after(1))
    shutil.rmtree(parent)
    train(branch, tmp_path / "branch")
    actual = losses(tmp_path / "branch")
    assert [step for step, split in actual if split == "train"] == [7, 8, 9]
    assert actual.items() <= losses(tmp_path / "uninterrupted").items()
    (line,) = evaluate(tmp_path / "branch", "test")
    assert line["parent_run"] == "parent@6" and line["parent_step"] == 6 and len(line["parent_params"]) == 16
    (uninterrupted,) = evaluate(tmp_path / "uninterrupted", "test")
    assert line["loss"] == uninterrupted["loss"] and "parent_run" not in uninterrupted


@pytest.mark.slow("trains a branch and the run to compare it with")
def test_a_branch_uses_its_schedule(constant_run, tmp_path):
    """The schedule is that of the config, from the step of the parent on: the rate falls over the last two steps.

    The losses equal those of an uninterrupted run to the bit: the schedule is no part of the compiled step.
    """
    config, parent = constant_run
    schedule = {"train.schedule": "linear", "train.decay_steps": 2, "train.steps": 8}
    train(apply_changes(config, schedule | {"train.branch_from": f"{parent}@newest"}), tmp_path / "branch")
    train(apply_changes(config, schedule), tmp_path / "uninterrupted")
    assert losses(tmp_path / "branch").items() <= losses(tmp_path / "uninterrupted").items()
    lines = [line for line in read_jsonl(tmp_path / "branch" / "metrics.jsonl") if line["split"] == "train"]
    assert np.allclose([line["learning_rate"] for line in lines], [0.01, 0.005])


@pytest.mark.slow("trains three runs on a stream")
def test_a_branch_continues_in_the_stream(config, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_WINDOW", 1500)
    monkeypatch.setattr(hugging_face, "_STREAM_SHARE", 10)
    draw = np.random.default_rng(0)
    rows = [" ".join(map(str, draw.integers(1000, size=draw.integers(1, 40)))) for _ in range(120)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    config = apply_changes(
        config, {"data.corpus": "hf", "data.path": str(tmp_path / "train.jsonl"), "data.streaming": True}
    )
    config = apply_changes(config, {"train.schedule": "constant", "train.steps": 8, "train.eval_every": 0})
    train(config, tmp_path / "uninterrupted")
    train(apply_changes(config, {"train.steps": 5}), tmp_path / "parent")
    train(apply_changes(config, {"train.branch_from": str(tmp_path / "parent")}), tmp_path / "branch")
    actual, uninterrupted = losses(tmp_path / "branch"), losses(tmp_path / "uninterrupted")
    assert {step for step, _ in actual} == {6, 7, 8} and actual.items() <= uninterrupted.items()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.steps": 6}, "has done 6 steps, and train.steps=6 must be more"),
        ({"train.steps": 9, "seed": 5}, r"a run of another config \(seed=0 there, 5 here\)"),
        ({"train.steps": 9, "model.model_dim": 32}, "model.model_dim=16 there, 32 here"),
        ({"train.steps": 9, "train.branch_from": "{parent}@5"}, "no checkpoint of step 5: it has .*6"),
        ({"train.steps": 9, "train.branch_from": "nowhere"}, "nowhere holds no run"),
    ],
    ids=str,
)
def test_an_invalid_branch_is_refused_and_writes_nothing(constant_run, tmp_path, changes, expected):
    config, parent = constant_run
    changes = {"train.branch_from": str(parent)} | changes
    changes["train.branch_from"] = changes["train.branch_from"].replace("{parent}", str(parent))
    with pytest.raises(InputError, match=expected):
        train(apply_changes(config, changes), tmp_path / "branch")
    assert not (tmp_path / "branch").exists()


def test_a_branch_of_another_corpus_is_refused(constant_run, tmp_path):
    wrong = {"data.path": write_corpus(tmp_path / "wrong", seed=9), "train.steps": 9}
    with pytest.raises(InputError, match="is not the one that the run began with"):
        train(apply_changes(constant_run[0], wrong | {"train.branch_from": str(constant_run[1])}), tmp_path / "branch")
    assert not (tmp_path / "branch").exists()
