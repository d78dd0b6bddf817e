"""An uninterrupted run equals a run stopped and resumed: the same losses to the bit, the same files."""

import itertools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.data import hugging_face, streaming
from flash_lm.errors import InputError, PassingError, RunError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.run_name import run_name
from flash_lm.training import train_loop
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.clock import Clock
from flash_lm.training.compiled_step import CompiledStep
from flash_lm.training.metrics import TIMES
from flash_lm.training.setup import Experiment, build_experiment
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return small_config(write_corpus(folder / "text"), folder / "cache")


@pytest.fixture(scope="module")
def finished_run(config, tmp_path_factory) -> pathlib.Path:
    """An uninterrupted run."""
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(config, workdir)
    return workdir


def figures(workdir: pathlib.Path) -> list[dict]:
    """The metric lines without the times."""
    lines = read_jsonl(workdir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def parameters(config, workdir: pathlib.Path):
    state, _ = restore(run_name(workdir), build_experiment(parse(config)).abstract)
    return jax.tree.leaves(state)


def test_the_run_is_recorded(config, finished_run):
    lines = figures(finished_run)
    steps = {split: [line["step"] for line in lines if line["split"] == split] for split in ("train", "validation")}
    assert steps == {"train": list(range(1, 13)), "validation": [4, 8, 12]}
    losses = [line["loss"] for line in lines if line["split"] == "validation"]
    assert losses[-1] < losses[0] < np.log(260) + 0.5
    assert {path.name for path in finished_run.iterdir()} == {
        "config.json", "tokenizer", "checkpoints", "metrics.jsonl", "tensorboard", "lock",
    }  # fmt: skip
    assert list((finished_run / "tensorboard").glob("events*"))
    # The newest two, and the best of the two that have an evaluation.
    kept = {int(path.name) for path in (finished_run / "checkpoints").iterdir()}
    assert kept == {9, 12}


@pytest.mark.parametrize(
    "stops",
    [[4], *(pytest.param(several, marks=pytest.mark.slow("other steps")) for several in ([1], [3, 4, 11]))],
    ids=str,
)
def test_stopped_and_resumed_equals_uninterrupted(config, finished_run, tmp_path, stops):
    for stop in stops:
        counter = itertools.count(1 + (int(max(stops[: stops.index(stop)], default=0))))
        train(config, tmp_path / "run", should_stop=lambda counter=counter, stop=stop: next(counter) == stop)
    train(config, tmp_path / "run")
    assert figures(tmp_path / "run") == figures(finished_run)
    for a, b in zip(parameters(config, tmp_path / "run"), parameters(config, finished_run), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.slow("trains a run of 12 steps, with a resume")
def test_a_killed_run_continues_from_its_checkpoint(config, finished_run, tmp_path, monkeypatch):
    def crash():
        raise KeyboardInterrupt

    counter = itertools.count(1)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", should_stop=lambda: crash() if next(counter) == 8 else False)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "split": "tr')
    train(config, tmp_path / "run")
    assert figures(tmp_path / "run") == figures(finished_run)


def test_a_finished_run_does_nothing(config, finished_run, capsys):
    before = (finished_run / "metrics.jsonl").read_text()
    train(config, finished_run)
    assert "all 12 steps are done" in capsys.readouterr().out
    assert (finished_run / "metrics.jsonl").read_text() == before


@pytest.mark.slow("trains another run of 12 steps")
def test_the_best_checkpoint_outlives_the_newest(config, tmp_path):
    config = config.copy_and_resolve_references()
    # A rate that ruins the model after the first evaluation.
    config.train.update(checkpoint_every=4, learning_rate=3.0, clip=0.0, keep=1, warmup_steps=11)
    train(config, tmp_path)
    scores = {line["step"]: line["loss"] for line in figures(tmp_path) if line["split"] == "validation"}
    best = min(scores, key=scores.__getitem__)
    assert best != 12
    assert {int(path.name) for path in (tmp_path / "checkpoints").iterdir()} == {best, 12}


def test_evaluation_is_that_of_training(config, finished_run):
    (result,) = evaluate(finished_run, "validation", [])
    line = figures(finished_run)[-1]
    assert result["step"] == 12
    for name in ("loss", "perplexity", "bits_per_byte", "tokens", "bytes"):
        assert np.isclose(result[name], line[name], rtol=1e-6)
    (other,) = evaluate(finished_run, "validation", [16])
    assert other["tokens"] == result["tokens"] and other["loss"] != result["loss"]


@pytest.mark.parametrize(
    ("group", "key", "value", "expected"),
    [
        ("model", "num_layers", 2, "model.num_layers=1 there, 2 here"),
        ("train", "learning_rate", 0.5, "train.learning_rate=0.01 there, 0.5 here"),
    ],
)
def test_a_workdir_of_another_config_is_refused(config, finished_run, group, key, value, expected):
    other = config.copy_and_resolve_references()
    other[group][key] = value
    before = sorted((path, path.stat().st_mtime) for path in finished_run.rglob("*"))
    with pytest.raises(InputError, match=expected):
        train(other, finished_run)
    assert sorted((path, path.stat().st_mtime) for path in finished_run.rglob("*")) == before


def test_intervals_may_change_at_a_resume(config, finished_run, tmp_path):
    counter = itertools.count(1)
    train(config, tmp_path / "run", should_stop=lambda: next(counter) == 5)
    other = config.copy_and_resolve_references()
    other.train.update(log_every=2, eval_every=0, checkpoint_every=0)
    train(other, tmp_path / "run")
    assert figures(tmp_path / "run")[-1] == figures(finished_run)[-1]


def test_a_folder_that_is_not_a_run_is_refused(config, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="is not a run of flash_lm"):
        train(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_tokenizer_or_corpus_is_refused(config, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer" / "kind.json").write_text(json.dumps({"kind": "sentencepiece"}))
    with pytest.raises(InputError, match="SentencePiece|tokenizer"):
        train(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    other = small_config(write_corpus(tmp_path / "text", seed=5), tmp_path / "cache")
    other.data.path = str(tmp_path / "text" / "*.txt")
    counter = itertools.count(1)
    train(other, tmp_path / "run", should_stop=lambda: next(counter) == 2)
    write_corpus(tmp_path / "text", seed=6)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(InputError, match="its content has changed"):
        train(other, tmp_path / "run")


def test_a_non_finite_loss_ends_the_run_and_is_not_saved(config, tmp_path, monkeypatch):
    class PoisonedStep(CompiledStep):
        def __call__(self, state, batch):
            number = int(state.step)
            state, metrics = super().__call__(state, batch)
            return state, metrics | ({"loss": np.float32(np.nan), "finite": np.False_} if number == 5 else {})

    monkeypatch.setattr(train_loop, "CompiledStep", PoisonedStep)
    with pytest.raises(RunError, match="step 6 .* loss nan"):
        train(config, tmp_path)
    assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == 3


def test_the_clock_counts_between_start_and_pause(monkeypatch):
    now = iter([10.0, 13.0, 50.0, 51.0, 54.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock(100.0)
    clock.start()
    clock.pause()
    assert clock.seconds == 103.0
    clock.start()
    assert clock.seconds == 104.0
    clock.pause()
    assert clock.seconds == 107.0


def test_a_refused_resume_does_not_change_the_config(config, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    other = config.copy_and_resolve_references()
    other.train.update(keep=5)
    before = (tmp_path / "run" / "config.json").read_text()
    train(other, tmp_path / "run")
    assert (tmp_path / "run" / "config.json").read_text() == before


@pytest.mark.slow("trains a run, and resumes it on eight devices")
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_a_run_moved_to_another_mesh_keeps_its_losses(config, finished_run, tmp_path, shape):
    counter = itertools.count(1)
    train(config, tmp_path / "run", should_stop=lambda: next(counter) == 6)
    other = config.copy_and_resolve_references()
    other.mesh.shape = shape
    train(other, tmp_path / "run")
    for a, b in zip(figures(tmp_path / "run"), figures(finished_run), strict=True):
        assert a["step"] == b["step"] and np.isclose(a["loss"], b["loss"], rtol=1e-5)


@pytest.mark.slow("trains another run twice, once with a resume")
def test_documents_accumulation_and_sentencepiece_train_and_resume(config, tmp_path):
    other = config.copy_and_resolve_references()
    other.data.update(pack="documents", tokenizer="sentencepiece", vocab_size=300, tokens_per_batch=512)
    other.train.update(accumulate=2)
    train(other, tmp_path / "uninterrupted")
    counter = itertools.count(1)
    train(other, tmp_path / "run", should_stop=lambda: next(counter) == 5)
    train(other, tmp_path / "run")
    assert figures(tmp_path / "run") == figures(tmp_path / "uninterrupted")


def stop_at(step: int):
    """Returns a should_stop that stops a new run at a step."""
    counter = itertools.count(1)
    return lambda: next(counter) == step


@pytest.mark.slow("trains a masked run twice, once with a resume, and scores it twice")
def test_a_masked_run_resumes_bit_for_bit_and_is_scored_by_its_masked_tokens(config, tmp_path):
    config = config.copy_and_resolve_references()
    config.task = "masked_lm"
    train(config, tmp_path / "uninterrupted")
    train(config, tmp_path / "run", should_stop=stop_at(5))
    train(config, tmp_path / "run")
    lines = figures(tmp_path / "uninterrupted")
    assert figures(tmp_path / "run") == lines
    losses = [line["loss"] for line in lines if line["split"] == "validation"]
    assert losses[-1] < losses[0] < np.log(260) + 0.5
    # Eight sequences of 32 tokens, some of them special or padding; the masks change from step to step.
    targets = [line["tokens"] for line in lines if line["split"] == "train"]
    assert len(set(targets)) > 3 and 0.08 < np.mean(targets) / 256 < 0.2
    first, again = (evaluate(tmp_path / "uninterrupted", "validation", [])[0] for _ in range(2))
    assert first == again
    assert first["task"] == "masked_lm" and "word_perplexity" not in first
    for name in ("loss", "tokens", "bytes", "bits_per_byte"):
        assert np.isclose(first[name], lines[-1][name], rtol=1e-6)
    # One byte per token, so bits per byte are bits per masked token.
    assert np.isclose(first["bits_per_byte"], first["loss"] / np.log(2))


@pytest.mark.slow("trains four runs on a stream, two of them with resumes")
def test_a_streamed_run_resumes_bit_for_bit(config, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_WINDOW", 1500)
    draw = np.random.default_rng(0)
    rows = [" ".join(map(str, draw.integers(1000, size=draw.integers(1, 40)))) for _ in range(120)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    config = config.copy_and_resolve_references()
    config.data.update(corpus="hf", path=str(tmp_path / "train.jsonl"), text_column="body", streaming=True)
    monkeypatch.setattr(hugging_face, "_STREAM_SHARE", 10)
    train(config, tmp_path / "uninterrupted")
    train(config, tmp_path / "run", should_stop=stop_at(5))
    train(config, tmp_path / "run", should_stop=stop_at(2))
    train(config, tmp_path / "run")
    assert figures(tmp_path / "run") == figures(tmp_path / "uninterrupted")
    for a, b in zip(parameters(config, tmp_path / "run"), parameters(config, tmp_path / "uninterrupted"), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(InputError, match="--split is one of validation, test"):
        evaluate(tmp_path / "run", "train", [])
    # A run that began with two streams, as on two hosts, goes on with them.
    share = Experiment.share
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "share", lambda experiment: share(experiment)._replace(groups=2))
        train(config, tmp_path / "two hosts", should_stop=stop_at(2))
    train(config, tmp_path / "two hosts")
    config.data.streams = 2
    train(config, tmp_path / "two streams")
    assert figures(tmp_path / "two hosts") == figures(tmp_path / "two streams") != figures(tmp_path / "run")


@pytest.mark.slow("trains another run until its stream breaks")
def test_a_stream_that_breaks_loses_nothing(config, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_WINDOW", 300)
    good = "".join(json.dumps({"text": f"document {i} and its text"}) + "\n" for i in range(150))
    for split, text in {"train-0": good, "train-1": good.replace("}", ""), "validation": good, "test": good}.items():
        (tmp_path / f"{split}.jsonl").write_text(text)
    config = config.copy_and_resolve_references()
    config.data.update(corpus="hf", path=str(tmp_path), streaming=True, shuffle_buffer=0)
    config.train.update(steps=500, checkpoint_every=0, eval_every=0, warmup_steps=0)
    with pytest.raises(
        PassingError, match="cannot load data.path=.*\nsaved at step .*: run the same command to continue"
    ) as error:
        train(config, tmp_path / "run")
    saved = int(str(error.value).split("saved at step ")[1].split(":")[0])
    assert saved > 3 and [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [str(saved)]
    assert figures(tmp_path / "run")[-1]["step"] == saved


def test_a_masked_validation_split_without_a_mask_is_refused(config, tmp_path):
    for split, text in {"train": "some text " * 99, "validation": "a", "test": "a"}.items():
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    config = config.copy_and_resolve_references()
    config.task = "masked_lm"
    config.data.update(corpus="hf", path=str(tmp_path), masking={"rate": 0.01})
    with pytest.raises(InputError, match="no token of the validation split is a target"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError):
        train(config, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
