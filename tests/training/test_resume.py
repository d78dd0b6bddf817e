"""Resumed runs: with other settings, by one process at a time, and after files were deleted."""

import collections
import json
import logging
import pathlib
import shutil

import numpy as np
import pytest
from small import flat, write_corpus

from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.data import token_cache
from flash_lm.data.share import Share
from flash_lm.errors import InputError, PassingError
from flash_lm.inference.model import load_model
from flash_lm.inference.scoring import evaluate
from flash_lm.runs import run_folder
from flash_lm.runs.lock import lock_folder
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training import checkpoint_read, resolve, resume
from flash_lm.training.resolve import continue_run, normalize
from flash_lm.training.train_loop import train
from training.runs import losses, small_run, stop_after

pytestmark = pytest.mark.usefixtures("usual_promotion")

# Each of them changes rounding alone.
HARMLESS = {
    "model.remat": "full",
    "model.scan_layers": False,
    "model.kernels": "xla",
    "model.quadratic.implementation": "plain",
    "train.loss_chunk": 32,
    "train.on_nonfinite": "skip",
    "train.best_metric": "bits_per_byte",
    "train.log_every": 2,
    "train.eval_every": 6,
    "train.eval_steps": 3,
    "train.checkpoint_every": 6,
    "train.keep": 1,
    "mesh.shape": (2, 2, 2),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished_run(config, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    train(config, workdir)
    return workdir


@pytest.fixture(scope="module")
def half_run(config, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "half"
    train(config, workdir, should_stop=stop_after(6))
    return workdir


def close(actual: dict, expected: dict) -> bool:
    return bool(actual) and all(np.isclose(loss, expected[key], rtol=2e-5) for key, loss in actual.items())


@pytest.mark.slow("compiles another training step, for eight devices")
def test_a_resumed_run_may_change_what_changes_rounding(config, finished_run, half_run, tmp_path):
    """All of it at once, with a moved corpus. The config of the run is kept; the changes apply from then on."""
    run = shutil.copytree(half_run, tmp_path / "run")
    moved = shutil.copytree(pathlib.Path(config.data.path).parent, tmp_path / "moved")
    other = apply_changes(config, HARMLESS | {"data.path": f"{moved}/*.txt", "data.cache_dir": str(tmp_path / "cache")})
    before = (run / "config.json").read_bytes()
    train(other, run)
    actual, expected = losses(run), losses(finished_run)
    assert close({key: loss for key, loss in actual.items() if key[1] == "train"}, expected)
    assert max(actual) == (12, "validation") and (6, "train") in actual and (7, "train") not in actual
    assert (run / "config.json").read_bytes() == before
    now = RunFolder(run).config
    resolved = {key: flat(now.to_dict())[key] for key in HARMLESS}
    assert resolved == HARMLESS | {"model.quadratic.implementation": "blocked"}  # which the family does not use
    assert now.data.path == other.data.path and now.train.learning_rate == config.train.learning_rate


def resolve_resumed(run: pathlib.Path, asked):
    """The config of a run that is resumed with the config `asked`."""
    return continue_run(normalize(asked), RunFolder(run))[0]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        *(({key: value}, None) for key, value in HARMLESS.items()),
        ({"data.path": "elsewhere"}, None),
        ({"train.warmup_steps": 2, "data.length": 32}, None),  # the value of the run, given explicitly
        ({"model.aft.bias_rate": 1.0, "model.favor.features": 3, "data.shuffle_buffer": 1}, None),  # of other families
        ({"train.accumulate": 2}, "train.accumulate=open there, 2 here"),  # dropout draws other masks
        ({"train.steps": 20}, "train.steps=12 there, 20 here.*branch_from="),
        ({"model.chunks.size": 4}, r"model.chunks.size=8 there, 4 here\): choose another --workdir$"),
        ({"train.warmup_steps": None, "data.vocab_size": 320}, None),  # left open: as the run has it
    ],
    ids=str,
)
def test_keys_that_a_resumed_run_may_change(config, half_run, changes, refused):
    other = apply_changes(config, changes)
    if refused is None:
        assert resolve_resumed(half_run, other).train.warmup_steps == 2
        return
    with pytest.raises(InputError, match=refused):
        resolve_resumed(half_run, other)


def test_how_softmax_is_computed_may_change(config, half_run, tmp_path):
    """For a family that uses it."""
    run = shutil.copytree(half_run, tmp_path / "run")
    other = apply_changes(config, {"model.family": "transformer"})
    (run / "config.json").write_text(json.dumps(other.to_dict()))
    resolve_resumed(run, apply_changes(other, {"model.quadratic.implementation": "plain"}))
    with pytest.raises(InputError, match="model.rotary=open there, True here"):
        resolve_resumed(run, apply_changes(other, {"model.rotary": True}))


def test_a_run_from_before_a_key_is_continued(config, half_run, tmp_path):
    """With the same command, where younger keys are open."""
    run = shutil.copytree(half_run, tmp_path / "run")
    values = json.loads((run / "config.json").read_text())
    for group, key in (("data", "streaming"), ("train", "decay_steps"), ("train", "branch_from")):
        del values[group][key]
    values["train"]["warmup_steps"] = 3
    (run / "config.json").write_text(json.dumps(values))
    now = apply_changes(config, {"train.warmup_steps": None})
    goes_on = resolve_resumed(run, now)
    assert (goes_on.data.streaming, goes_on.train.decay_steps, goes_on.train.warmup_steps) == (False, None, 3)
    with pytest.raises(InputError, match="train.decay_steps=open there, 2 here"):
        resolve_resumed(run, apply_changes(now, {"train.decay_steps": 2}))


def test_a_resume_reads_and_checks_its_config_once(config, half_run, tmp_path, monkeypatch):
    run, counts = shutil.copytree(half_run, tmp_path / "run"), collections.Counter()

    def count_calls(module, name):
        original = getattr(module, name)

        def wrapper(*arguments):
            if name != "load_json" or arguments[0].name == "config.json":
                counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(module, name, wrapper)

    count_calls(run_folder, "load_json")
    count_calls(resolve, "parse")
    assert not train(apply_changes(config, {"train.log_every": 2}), run, should_stop=stop_after(1))
    assert counts == {"load_json": 1, "parse": 1}


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_refused_resume_changes_nothing(config, finished_run, half_run, tmp_path):
    """Also of a finished run, whose user learns that the corpus has changed."""
    wrong = {"data.path": write_corpus(tmp_path / "wrong", seed=9)}
    for source in (finished_run, half_run):
        run = shutil.copytree(source, tmp_path / source.name)
        before = contents(run)
        with pytest.raises(InputError, match="is not the one that the run began with"):
            train(apply_changes(config, wrong), run)
        assert contents(run) == before


def test_microbatches_may_change_without_random_draws(config, half_run, tmp_path):
    """test_train_step.py checks that they change rounding alone."""
    run = shutil.copytree(half_run, tmp_path / "run")
    path = run / "config.json"
    path.write_text(path.read_text().replace('"dropout": 0.1', '"dropout": 0.0'))
    resolve_resumed(run, apply_changes(config, {"model.dropout": 0.0, "train.accumulate": 2}))


def test_one_run_at_a_time(config, half_run, tmp_path):
    run = shutil.copytree(half_run, tmp_path / "run")
    before = sorted((path, path.stat().st_mtime) for path in run.rglob("*") if path.name != "lock")
    with (
        lock_folder(run),
        pytest.raises(PassingError, match=r"process \d+ on .* is training in .*: wait for it to end"),
    ):
        train(config, run)
    assert sorted((path, path.stat().st_mtime) for path in run.rglob("*") if path.name != "lock") == before
    with lock_folder(run):  # the lock has been released
        pass


@pytest.mark.slow("trains a run, and scores it four times")
def test_a_path_may_be_a_string(config, tmp_path):
    """The best checkpoint, or one of a step, can be named, too."""
    run = f"{tmp_path}/run"
    train(apply_changes(config, {"train.steps": 4, "train.checkpoint_every": 2, "train.eval_every": 2}), run)
    scores = {step: loss for (step, split), loss in losses(pathlib.Path(run)).items() if split == "validation"}
    assert set(scores) == {2, 4}
    metrics = pathlib.Path(run) / "checkpoints" / "2" / "metrics" / "metrics"
    metrics.write_text(
        json.dumps(json.loads(metrics.read_text()) | {"loss": 0.5})
    )  # so that not the newest is the best
    named = {"": ("newest", 4), "@newest": ("newest", 4), "@2": ("step", 2), "@best": ("best", 2)}
    for which, (checkpoint, step) in named.items():
        (line,) = evaluate(f"{run}{which}", "validation")
        assert (line["checkpoint"], line["step"]) == (checkpoint, step)
        assert np.isclose(line["loss"], scores[step], rtol=1e-6) and load_model(f"{run}{which}").step == step
    with pytest.raises(InputError, match="has no checkpoint of step 3: it has 2, 4"):
        load_model(f"{run}@3")
    for metrics in pathlib.Path(run).glob("checkpoints/*/metrics/metrics"):
        metrics.write_text(metrics.read_text().replace("loss", "lost"))
    with pytest.raises(InputError, match=f"none is the best: use {run}@4, or make train.checkpoint_every"):
        load_model(f"{run}@best")


def test_a_damaged_config_is_not_reported_as_a_usage_error(half_run, tmp_path, monkeypatch):
    run = shutil.copytree(half_run, tmp_path / "run")
    text = (run / "config.json").read_text()
    for damaged in (
        text[:100],
        "[]",
        "{}",
        text.replace('"data": {', '"data": 3, "dat": {'),
        text.replace('"gau": {', '"gau": 5, "ga": {'),
    ):
        (run / "config.json").write_text(damaged)
        with pytest.raises(InputError, match=r"config.json is damaged"):
            _ = RunFolder(run).config
    (run / "config.json").write_text(text)
    monkeypatch.setattr(run_folder, "upgrade", lambda values: values + 1)
    with pytest.raises(TypeError):
        _ = RunFolder(run).config


def test_scoring_reads_only_parameters_on_the_given_mesh(finished_run, monkeypatch):
    asked = []
    read = checkpoint_read._read_step

    def spy(workdir, step, config, abstract):
        asked.append(set(abstract))
        return read(workdir, step, config, abstract)

    monkeypatch.setattr(checkpoint_read, "_read_step", spy)
    (one,) = evaluate(finished_run, "validation")
    (other,) = evaluate(finished_run, "validation", mesh_shape=(1, 4, 2))
    assert asked == [{"params"}, {"params"}]
    assert np.isclose(one["loss"], other["loss"], rtol=1e-6)
    kernels = load_model(finished_run, mesh_shape=(1, 4, 2)).params["layers"]["sublayer_0"]["output"]["kernel"]
    assert kernels.addressable_shards[0].data.size == kernels.size // 8


def test_a_new_text_is_scored_without_the_corpus_of_the_run(finished_run, tmp_path, monkeypatch):
    """Without the cache, too, and with the tokenizer of the run: the full text, or the parts that are split off."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    monkeypatch.setattr(token_cache, "train_sentencepiece", None)
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"path": str(tmp_path / "gone" / "*.txt"), "cache_dir": str(tmp_path / "empty")}
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="no file matches"):
        evaluate(run, "test")
    text = "the cat sees a dog\n" * 100
    (tmp_path / "mine.txt").write_text(text)
    (line,) = evaluate(run, "whole", [16], overrides=[f"--config.data.path={tmp_path / 'mine.txt'}"])
    assert (line["own_corpus"], line["bytes"], line["length"], line["split"]) == (False, len(text), 16, "whole")
    tokens = load_model(run).encode(text)
    # Every token but the first is a target, and so is the end.
    assert line["tokens"] == len(tokens) and line["loss"] < np.log(320)
    (part,) = evaluate(run, "test", overrides=[f"--config.data.path={tmp_path / 'mine.txt'}"])
    assert 0 < part["bytes"] < len(text) / 5
    for word, expected in (
        (
            "--config.model.num_layers=1",
            "cannot be changed after training, or has a separate flag: keys to change here are data.corpus",
        ),
        ("--config.data.length=16", "cannot be changed after training, or has a separate flag"),
        ("--config.mesh.shape=1,1,1", "cannot be changed after training, or has a separate flag"),
        ("--config.data.corpus=stdlib --config.data.path=x", "does not read data.path: leave data.corpus out"),
        ("--config.data.corpus=copy --config.data.pack=examples", "corpus copy has other tokens"),
        ("--splt=test", "unknown argument --splt=test"),
    ):
        with pytest.raises(InputError, match=expected):
            evaluate(run, "test", overrides=word.split())
    with pytest.raises(InputError, match="no split dev: --split is one of train, validation, test, whole"):
        evaluate(run, "dev")


def test_a_run_outlives_its_cache(config, finished_run, half_run, tmp_path, monkeypatch):
    """The corpus is tokenized again with the run's tokenizer; one that is trained again might differ."""
    monkeypatch.setattr(token_cache, "train_sentencepiece", None)
    run = shutil.copytree(half_run, tmp_path / "run")
    train(apply_changes(config, {"data.cache_dir": str(tmp_path / "new")}), run)
    assert losses(run) == losses(finished_run)
    (line,) = evaluate(run, "validation")
    assert line["own_corpus"] and line["step"] == 12


@pytest.mark.slow("trains a run twice, once with a resume, and scores it four times")
def test_a_run_outlives_its_corpus(config, tmp_path, caplog):
    """For instance, the standard library changes with Python; the run continues as long as the tokens are cached."""
    folder = tmp_path / "text"
    mine = apply_changes(config, {"data.path": write_corpus(folder, seed=3), "data.cache_dir": str(tmp_path / "cache")})
    mine = apply_changes(mine, {"train.steps": 4, "train.eval_every": 0, "train.checkpoint_every": 2})
    train(mine, tmp_path / "uninterrupted")
    train(mine, tmp_path / "run", should_stop=stop_after(2))
    (before,) = evaluate(tmp_path / "uninterrupted", "test")
    (folder / "00.txt").write_text("a new release\n")
    train(mine, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "uninterrupted")
    (line,) = evaluate(tmp_path / "run", "test")
    assert line["loss"] == before["loss"] and line["own_corpus"]
    assert "corpus text has changed: using the tokens of the earlier one" in caplog.text
    shutil.rmtree(folder)
    (line,) = evaluate(tmp_path / "run", "test", overrides=["--config.model.kernels=xla"])
    assert line["loss"] == before["loss"]
    write_corpus(folder, seed=4)
    shutil.rmtree(tmp_path / "cache")
    (line,) = evaluate(tmp_path / "run", "test")
    assert not line["own_corpus"] and "may contain training text" in caplog.text
    # After the corpus moved, its content is checked.
    elsewhere = write_corpus(tmp_path / "elsewhere", seed=4)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    with pytest.raises(InputError, match="is not the one that the run began with"):
        train(apply_changes(mine, {"data.path": elsewhere}), tmp_path / "run")


def test_another_tokenizer_in_the_folder_is_detected(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    lines = [f"abcdefgh {i} hgfedcba {1000 - i}\n" for i in range(400)]
    token_cache.save_tokenizer(token_cache.train_sentencepiece(lines, 320), run / "tokenizer")
    with pytest.raises(InputError, match="holds another tokenizer .* than the one that it was trained with"):
        load_model(run)


@pytest.mark.slow("trains a run twice with each optimizer, once with a resume")
@pytest.mark.parametrize("optimizer", ["muon", "schedule_free_adamw"])
def test_optimizers_with_further_states_resume_to_the_bit(config, tmp_path, optimizer):
    """Also with microbatches; the saved parameters are those that were evaluated."""
    config = apply_changes(config, {"train.optimizer": optimizer, "data.tokens_per_batch": 512, "train.accumulate": 2})
    train(config, tmp_path / "uninterrupted")
    train(config, tmp_path / "run", should_stop=stop_after(5))
    train(config, tmp_path / "run")
    actual, uninterrupted = losses(tmp_path / "run"), losses(tmp_path / "uninterrupted")
    assert actual == uninterrupted
    (result,) = evaluate(tmp_path / "run", "validation")
    assert np.isclose(result["loss"], uninterrupted[max(step for step, _ in uninterrupted), "validation"], rtol=1e-6)


def test_a_run_keeps_the_batch_that_its_first_devices_needed(config, tmp_path):
    """If it was open: a resume on fewer devices would otherwise choose another."""
    mine = apply_changes(config, {"data.tokens_per_batch": None, "train.steps": 3})
    train(mine, tmp_path / "run", should_stop=stop_after(1))
    written = json.loads((tmp_path / "run" / "config.json").read_text())["data"]["tokens_per_batch"]
    assert written == parse(mine).data.tokens_per_batch
    less = apply_changes(config, {"data.tokens_per_batch": None, "train.steps": 3, "mesh.shape": (1, 1, 8)})
    assert resolve_resumed(tmp_path / "run", less).data.tokens_per_batch == written


@pytest.mark.parametrize(("groups", "said"), [(1, False), (2, False), (3, True)])
def test_hosts_that_will_read_the_same_stream_say_so(caplog, groups, said):
    positions = [{"epoch": 0}, {"epoch": 1}]
    with caplog.at_level(logging.INFO, "flash_lm"):
        assert resume._positions({"places": positions}, Share(6, range(6), groups)) == positions
    assert ("read as 2 streams since the run began: several of 3 hosts" in caplog.text) == said
