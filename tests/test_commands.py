"""The commands as a user types them: train, resume, evaluate, compare; and the errors of bad input."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from small import ROOT, command, finish, override_flags, small_config, write_corpus

from flash_lm import evaluate, train
from flash_lm.cli.run import run
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def words(corpus, tmp_path):
    """Overrides that make the quickstart as small as the run of the other tests, on one device."""
    return override_flags(small_config(corpus, tmp_path / "cache"))


def test_train_stop_resume_evaluate_compare(words, tmp_path):
    workdir = tmp_path / "runs" / "flash"
    arguments = ("--config=configs/quickstart.py", f"--workdir={workdir}", *words, "--config.train.steps=600")
    arguments += ("--config.train.checkpoint_every=200", "--config.train.eval_every=200")
    first = command("flash_lm.train", *arguments)
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not list((workdir / "checkpoints").glob("200")):
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=240)
    assert first.returncode == 75 and "run the same command to continue" in out + err
    stopped = read_jsonl(metrics)[-1]["step"]
    assert 200 < stopped < 600
    finish(command("flash_lm.train", *arguments))
    lines = read_jsonl(metrics)
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, 601))
    assert [line["step"] for line in lines if line["split"] == "validation"] == [200, 400, 600]

    out, _ = finish(command("flash_lm.evaluate", f"--workdir={workdir}", "--lengths=16,32"))
    assert len(out.splitlines()) == 2 and "perplexity" in out
    results = read_jsonl(workdir / "results.jsonl")
    assert [result["length"] for result in results] == [16, 32]
    assert results[0]["family"] == "transformer_plus_plus" and results[0]["step"] == 600
    # The perplexity of a model that has learned nothing is 260.
    assert results[1]["perplexity"] < 30

    script = [sys.executable, "-m", "flash_lm", "compare", str(workdir), "--step-time", "--rounds=1"]
    script += ["--format=pdf,svg", "--width=single", f"--out={tmp_path / 'out'}"]
    out = subprocess.run(script, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "| transformer_plus_plus " in out and "   600 | " in out
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "curves.pdf").read_bytes().startswith(b"%PDF") and (
        tmp_path / "out" / "curves.svg"
    ).exists()
    curve = read_jsonl(tmp_path / "out" / "validation.jsonl")
    (timed,) = read_jsonl(tmp_path / "out" / "step_times.jsonl")
    assert [line["rated_seconds"] for line in curve] == [line["step"] * timed["step_ms"] / 1000 for line in curve]
    assert [line["flops"] / line["step"] for line in curve] == [timed["model_flops"]] * 3
    assert read_jsonl(tmp_path / "out" / "results.jsonl")[0]["length"] == 32
    assert (tmp_path / "out" / "table.md").read_text().strip().splitlines()[-1] in out


def failure(main, argv: list[str], monkeypatch, capsys) -> list[str]:
    """Runs a command that must end like one with bad input; returns the lines that it prints."""
    monkeypatch.setattr(sys, "argv", ["command", *argv])
    with pytest.raises(SystemExit) as stop:
        run(main)
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines
    return lines


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["--config.data.path=/nowhere/*.txt"], "no file matches data.path=/nowhere/*.txt"),
        (["--config.data.corpus=stdlib"], "data.corpus=stdlib does not read data.path: leave data.corpus out"),
        (["--config.data.path={tmp}/empty.txt"], "is empty"),
        (["--config.data.path={tmp}/broken.txt"], "broken.txt is not UTF-8 at byte 3"),
        (
            ["--config.data.path={tmp}/broken.txt", "--config.data.tokenizer=sentencepiece"],
            "broken.txt is not UTF-8 at byte 3",
        ),
        (
            ["--config.data.corpus=hf", "--config.data.path="],
            "needs either data.name (a data set on the hub) or data.path",
        ),
        (
            ["--config.data.corpus=hf", "--config.data.path=", "--config.data.name=google/wiki40b"],
            "data.name=google/wiki40b is not on this machine and the hub cannot be reached",
        ),
        (["--config.data.corpus=hf", "--config.data.path={tmp}/rows.jsonl", "--config.data.split=dev"], "no split dev"),
        (
            ["--config.data.corpus=hf", "--config.data.path={tmp}/rows.jsonl", "--config.data.text_column=body"],
            "no column body of text in the train split of the data set: --config.data.text_column is one of text",
        ),
        (["--config.mesh.shape=(3,-1,1)"], "mesh.shape=(3, -1, 1) must make 8, the number of devices"),
        (["--config.task=masked_lm", "--config.model.causal=true"], "task=masked_lm needs a bidirectional model"),
        (["--config.task=masked"], "task=masked must be one of causal_lm, masked_lm"),
        (["--config.train.schedule=step"], "train.schedule=step and train.boundaries go together"),
        (["--config.train.optimizer=adam"], "must be one of adamw, radam, lion, adafactor, lamb"),
        (["--config.data.length=64"], "data.length=64 is greater than model.max_length=32"),
        (["--config.model.family=flush"], "model.family=flush must be one of transformer, "),
        (["--config.model.famly=flash"], "unknown key model.famly: did you mean model.family?"),
        (["--config.data.tokens_per_batch=96"], "must be a multiple of data x fsdp"),
        (["--config.data.tokenizer=sentencepiece", "--config.data.tokenizer_path={tmp}/broken.txt"], "SentencePiece"),
        (["--config.data.tokenizer=sentencepiece", "--config.data.vocab_size=9999"], "too small for data.vocab_size"),
    ],
)
def test_bad_input_ends_in_one_line_and_writes_nothing(words, changes, expected, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"text": "word"}\n' * 100)
    (tmp_path / "broken.txt").write_bytes(b"abc\xff" + b"def\n" * 100)
    changes = [change.replace("{tmp}", str(tmp_path)) for change in changes]
    workdir = tmp_path / "run"
    argv = ["--config=configs/quickstart.py", f"--workdir={workdir}", *words, *changes]
    lines = failure(train.main, argv, monkeypatch, capsys)
    assert len(lines) == 1 and expected in lines[0]
    assert not workdir.exists()


def test_evaluating_a_missing_run(tmp_path, monkeypatch, capsys):
    (line,) = failure(evaluate.main, [f"--workdir={tmp_path}"], monkeypatch, capsys)
    assert "holds no run: train one there" in line
    (line,) = failure(evaluate.main, [f"--workdir={tmp_path}", "--lengths=0"], monkeypatch, capsys)
    assert "--lengths=0 must be positive" in line
    (tmp_path / "config.json").write_text(json.dumps({})[:1])
    (line,) = failure(evaluate.main, [f"--workdir={tmp_path}"], monkeypatch, capsys)
    assert "config.json is damaged" in line


@pytest.mark.slow("trains a run")
def test_evaluating_a_split_or_a_length_that_does_not_exist(words, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    argv = ["--config=configs/quickstart.py", f"--workdir={workdir}", *words, "--config.train.steps=3"]
    monkeypatch.setattr(sys, "argv", ["command", *argv, "--config.model.family=transformer"])
    run(train.main)
    (line,) = failure(evaluate.main, [f"--workdir={workdir}", "--split=dev"], monkeypatch, capsys)
    assert "--split is one of train, validation, test" in line
    (line,) = failure(evaluate.main, [f"--workdir={workdir}", "--lengths=16,64"], monkeypatch, capsys)
    assert "64 tokens exceed model.max_length=32" in line
    assert not (workdir / "results.jsonl").exists()


def test_a_path_that_cannot_be_written_is_reported_in_one_line(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "run" / "lock").mkdir(parents=True)
    errors = {
        "/proc/x": "/proc/x does not exist and cannot be made: choose another place",
        tmp_path / "run": "lock is a folder, where a file should be: remove it, or choose another place",
    }
    for path, expected in errors.items():
        (line,) = failure(train.main, ["--config=configs/base.py", *words, f"--workdir={path}"], monkeypatch, capsys)
        assert line.endswith(expected)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EROFS, "x/results.jsonl is on a disk that cannot be written: choose another folder"),
        (errno.EACCES, "permission denied for x/results.jsonl: choose another folder"),
        (errno.ENOTDIR, "x/results.jsonl is a file: choose another folder"),
        (errno.EIO, "x/results.jsonl: Input/output error: check the disk"),
    ],
)
def test_a_disk_error_is_reported_in_one_line(number, expected, monkeypatch, capsys):
    def main(argv):
        raise OSError(number, os.strerror(number), "x/results.jsonl")

    assert failure(main, [], monkeypatch, capsys) == [f"error: {expected}"]


def test_training_refuses_a_checkpoint_as_folder(tmp_path, monkeypatch, capsys):
    (line,) = failure(train.main, ["--config=configs/tiny.py", f"--workdir={tmp_path}/x@best"], monkeypatch, capsys)
    assert f"use --config.train.branch_from={tmp_path}/x@best" in line and not list(tmp_path.iterdir())


def test_the_config_of_the_paper_without_a_network_names_an_offline_corpus(tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    (line,) = failure(train.main, ["--config=configs/flash_base.py", f"--workdir={workdir}"], monkeypatch, capsys)
    assert "--config.data.corpus=stdlib" in line and not workdir.exists()


def start_printing(text: str, **environment: str) -> subprocess.Popen:
    """A command that prints a text through `run`, like all commands."""
    program = f"from flash_lm.cli.run import run; run(lambda words: print({text}))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ | environment, **pipes)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", b"a caf?, ?\n"), ("latin-1", b"a caf\xe9, ?\n"), ("utf-8", "a café, 猫\n".encode())],
)
def test_a_terminal_gets_characters_that_it_can_show(encoding, shown):
    out, err = start_printing("'a café, 猫'", PYTHONIOENCODING=encoding).communicate(timeout=60)
    assert (out, err) == (shown, b"")


@pytest.mark.parametrize("text", ["'猫' * 10**6", "'in the buffer until the end'"])
def test_a_reader_that_stops_early_ends_a_command_quietly(text):
    process = start_printing(text)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 141


def test_help_that_nobody_reads_ends_quietly():
    process = command("flash_lm", "generate", "--help")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == 0


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_one_line():
    program = "from flash_lm.cli.run import run; run(lambda words: print('a'))"
    with open("/dev/full", "w") as full:
        words = {"stdout": full, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "check": False}
        done = subprocess.run([sys.executable, "-c", program], **words)
    assert done.returncode == 1 and done.stderr == "error: a file: No space left on device: free space\n"
