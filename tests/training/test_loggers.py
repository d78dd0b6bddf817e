"""What watches a run: loggers, on_log, samples, progress without a terminal, size and memory in one line."""

import logging
import sys
from typing import ClassVar

import jax
import pytest
from small import small_config, write_corpus

from flash_lm.config.registry import LOGGERS
from flash_lm.errors import InputError, RunError
from flash_lm.extend import Logger, register_logger
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training import train_loop
from flash_lm.training.compiled_step import CompiledStep
from flash_lm.training.metrics import TIMES, MetricsWriter
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def config(corpus, tmp_path):
    config = small_config(corpus, tmp_path / "cache")
    config.train.update(steps=4, log_every=1, eval_every=2, checkpoint_every=2)
    return config


class Recorder(Logger):
    """Keeps what it gets, by run."""

    runs: ClassVar[list] = []

    def __init__(self, run):
        self.lines, self.closed = [], False
        self.runs.append((run, self))

    def log(self, step, split, values):
        self.lines.append({"step": step, "split": split, **values})
        if split == "validation" and self.fails:
            raise ConnectionError("no network")

    def close(self):
        self.closed = True

    fails = False


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(LOGGERS, "registered", dict(LOGGERS.data))
    monkeypatch.setattr(Recorder, "runs", [])
    register_logger("mine", Recorder)
    return Recorder


def test_loggers_and_on_log_get_every_line_with_samples_and_speed(config, tmp_path, recorder, capsys, monkeypatch):
    """A resumed run stays one run; the samples change nothing of the training."""
    peak = lambda *_: 1e12
    monkeypatch.setattr("flash_lm.training.plan.Plan.peak", property(peak))
    config.train.update(log_to=("tensorboard", "mine"), project="p", sample_prompt="the cat", sample_tokens=5)
    seen = []
    train(config, tmp_path / "run", on_log=lambda step, split, values: seen.append((step, split, dict(values))))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    ((run, logger),) = recorder.runs
    assert logger.lines == lines and logger.closed
    assert [{"step": step, "split": split, **values} for step, split, values in seen] == lines
    assert (run.project, run.name, run.step) == ("p", "run", 0) and run.config["train"]["steps"] == 4

    # Samples, and what engineers read.
    samples = [line for line in lines if line["split"] == "sample"]
    assert [line["step"] for line in samples] == [2, 4] and samples[0]["prompt"] == "the cat"
    printed = capsys.readouterr().out
    assert f"step 2: the cat{samples[0]['text']}" in printed
    assert "memory per device: state " in printed and "FLOPs per step of " in printed
    trained = [line for line in lines if line["split"] == "train"]
    tokens = config.data.tokens_per_batch
    assert [line["tokens"] for line in trained] == [tokens, 2 * tokens, 3 * tokens, 4 * tokens]
    flops = {round(line["mfu"] * line["step_ms"] * 1e9 * len(jax.devices())) for line in trained}
    assert len(flops) == 1 and trained[0]["memory_bytes"] > 1e7

    # The same run without samples and loggers, to the bit.
    config.train.update(log_to=(), sample_prompt="")
    train(config, tmp_path / "plain")
    same = lambda line: {key: x for key, x in line.items() if key not in TIMES}
    plain = [same(line) for line in read_jsonl(tmp_path / "plain" / "metrics.jsonl")]
    assert plain == [same(line) for line in lines if line["split"] != "sample"]
    assert not (tmp_path / "plain" / "tensorboard").exists()


def test_a_logger_that_fails_does_not_end_the_run(config, tmp_path, recorder, monkeypatch, caplog):
    monkeypatch.setattr(Recorder, "fails", True)
    config.train.log_to = ("mine",)
    with caplog.at_level(logging.WARNING, logger="flash_lm"):
        assert train(config, tmp_path / "run")
    ((_, logger),) = recorder.runs
    assert [line["split"] for line in logger.lines] == ["train", "train", "validation"]
    assert [record.message for record in caplog.records if "mine failed" in record.message] == [
        "mine failed (no network): it gets no more lines of this run"
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train.log_to": ("wandb",)}, "wandb is not installed"),
        ({"train.log_to": ("tensorbord",)}, r"did you mean tensorboard\?"),
        (
            {"train.sample_prompt": "a", "train.sample_tokens": 10**6},
            "train.sample_prompt has .*shorten one of them",
        ),
        ({"train.sample_prompt": "a", "task": "masked_lm"}, "train.sample_prompt is for models that continue a text"),
    ],
)
def test_what_cannot_log_or_sample_is_refused_before_anything_is_written(config, tmp_path, keys, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config.update_from_flattened_dict(keys)
    with pytest.raises(InputError, match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_without_a_terminal_the_progress_is_lines_now_and_then(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("flash_lm.training.metrics._now", lambda: now[0])
    writer = MetricsWriter(tmp_path, step=0, steps=1000)
    for step in range(1, 1001):
        now[0] += 1
        writer.progress(step, {"loss": f"{step / 10:.4g}", "left": "9 s"})
    writer.close()
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "step 1 of 1,000: loss 0.1, left 9 s" and lines[1].startswith("step 31 of 1,000")
    assert len(lines) == 35 and lines[-1] == "step 1,000 of 1,000: loss 100, left 9 s"
    assert "%" not in captured.err and len(captured.err) < 10


def test_out_of_memory_ends_in_one_line_with_the_keys_that_help(config, tmp_path, monkeypatch):
    class Exhausted(CompiledStep):
        def __call__(self, state, batch):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

    monkeypatch.setattr(train_loop, "CompiledStep", Exhausted)
    with pytest.raises(RunError) as error:
        train(config, tmp_path / "run")
    (line,) = str(error.value).splitlines()
    assert (
        line.startswith("out of memory on cpu: a step takes state ")
        and "in this order try --config.model.remat=" in line
    )
    assert line.endswith("--config.data.tokens_per_batch (fewer)")


def test_other_errors_of_a_device_stay_as_they_are(config, tmp_path, monkeypatch):
    class Broken(CompiledStep):
        def __call__(self, state, batch):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(train_loop, "CompiledStep", Broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        train(config, tmp_path / "run")


def test_the_signatures_of_trackers_are_those_that_we_call():
    """Of the real packages, where they are installed."""
    import inspect  # noqa: PLC0415

    common = {"project", "name", "config", "resume"}
    for name, wanted in (("wandb", common | {"id"}), ("trackio", common)):
        package = pytest.importorskip(name)
        assert wanted <= inspect.signature(package.init).parameters.keys()
        assert "step" in inspect.signature(package.Run.log).parameters and callable(package.Run.finish)
