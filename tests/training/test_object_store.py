"""A run whose folder, corpus and cache lie in an object store."""

import itertools
import os
import pathlib
import socket
import subprocess
import time

import numpy as np
import pytest
from small import command, finish, override_flags, python, small_config, write_corpus

import flash_lm
from flash_lm import evaluate, export
from flash_lm.config.experiment import parse
from flash_lm.data.token_cache import load_tokenized
from flash_lm.errors import InputError, PassingError, RunError
from flash_lm.inference.scoring import evaluate as score
from flash_lm.runs import lease
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.storage import to_path
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")
RUN, CORPUS, CACHE, EXPORT = (f"gs://bucket/{name}" for name in ("runs/x", "text", "cache", "exported/x"))

COMMITTED = "/commit_success.txt"


def losses(workdir) -> list[tuple[int, str, float]]:
    return [(line["step"], line["split"], line["loss"]) for line in read_jsonl(workdir / "metrics.jsonl")]


def upload(folder: pathlib.Path, address: str) -> None:
    for path in folder.iterdir():
        (to_path(address) / path.name).write_bytes(path.read_bytes())


@pytest.mark.slow("trains, resumes and branches runs in a store")
def test_a_run_in_an_object_store(bucket, tmp_path, monkeypatch):
    """It loses its lease, goes on, is scored, generates and is exported, as a run in a local folder."""
    write_corpus(tmp_path / "text")
    upload(tmp_path / "text", CORPUS)
    config = small_config(f"{CORPUS}/*.txt", tmp_path / "cache", "aft_simple")
    config.data.update(tokenizer="sentencepiece", vocab_size=320, cache_dir=CACHE)
    local = config.copy_and_resolve_references()
    local.data.update(path=str(tmp_path / "text" / "*.txt"), cache_dir=str(tmp_path / "cache"))
    train(local, tmp_path / "run")
    expected = losses(tmp_path / "run")

    # Another process takes the run over, and ends; the newest checkpoint is damaged.
    monkeypatch.setattr(lease, "LEASE_S", 10.0)
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    other, steps = lease.Lease(to_path(f"{RUN}/lock"), now=lambda: time.time() + 11), itertools.count(1)

    def lose() -> bool:
        if (step := next(steps)) == 8:
            assert other.take() is None  # for its clock our lease has ended
        if step >= 8:
            time.sleep(1)  # ours would be renewed meanwhile
        return False

    with pytest.raises(RunError, match=r"^gs://bucket/runs/x/lock: process \d+ on \S+ has taken over"):
        train(config, RUN, lose)
    there = losses(to_path(RUN))
    assert there == expected[: len(there)] and there[-1][0] == 6
    (to_path(RUN) / "checkpoints" / "6" / "facts" / "metadata").write_text("{}")
    other.release()

    # The same command goes on from the checkpoint before; meanwhile nobody else may train.
    def try_to_train() -> bool:
        if next(steps) == 5:
            with pytest.raises(
                PassingError, match=r"^process \d+ on .* is training in gs://bucket/runs/x: wait for it"
            ):
                train(config, RUN)
        return False

    steps = itertools.count(1)
    assert train(config, RUN, try_to_train)
    assert losses(to_path(RUN)) == expected and not bucket.names("runs/x/lock/")
    assert bucket.names("runs/x/damaged/6/state/") and not bucket.names("runs/x/checkpoints/6/")
    there, here = (sorted(x.name for x in (y / "checkpoints").iterdir()) for y in (to_path(RUN), tmp_path / "run"))
    assert there == here

    # Its score equals the local run's, and is a line of a file that lies with the run; its export writes the same text.
    evaluate.main([f"--workdir={RUN}", "--split=validation"])
    (line,), (there,) = score(tmp_path / "run", "validation"), read_jsonl(to_path(RUN) / "results.jsonl")
    assert line["nll"] == there["nll"]
    export.main([f"--workdir={RUN}", f"--out={EXPORT}", "--license=mit"])
    texts = {flash_lm.load(name).generate("a cat", max_tokens=4, temperature=0) for name in (RUN, EXPORT)}
    assert len(texts) == 1
    with pytest.raises(InputError, match=f"--out={EXPORT} already exists"):
        export.main([f"--workdir={RUN}", f"--out={EXPORT}", "--license=mit"])


def start(config, *words: str, home: pathlib.Path, devices: int = 1) -> subprocess.Popen:
    """Starts training on a machine with its own disk."""
    flags = ["--config=configs/base.py", *override_flags(config), f"--workdir={RUN}", *words]
    return command("flash_lm.train", *flags, devices=devices, env=os.environ | {"HOME": str(home)})


def wait_for(bucket, step: int, *processes: subprocess.Popen) -> None:
    while not any(int(x.split("/")[3]) >= step for x in bucket.names("runs/x/checkpoints/") if COMMITTED in x):
        assert all(process.poll() is None for process in processes), [x.communicate() for x in processes]
        time.sleep(0.05)


@pytest.mark.slow("starts three processes that train, one of which waits for the lease of a killed one")
def test_a_killed_run_goes_on_elsewhere(bucket, tmp_path):
    write_corpus(tmp_path / "text")
    upload(tmp_path / "text", CORPUS)
    config = small_config(f"{CORPUS}/*.txt", tmp_path / "cache")
    config.data.cache_dir = CACHE
    config.train.update(steps=100_000, checkpoint_every=100, eval_every=1000, log_every=50)
    first = start(config, home=tmp_path / "one")
    wait_for(bucket, 100, first)
    began = time.monotonic()
    second = start(config, home=tmp_path / "two")
    _, err = second.communicate(timeout=300)
    assert second.returncode == 75  # a launcher tries again
    line = err.splitlines()[-1]
    assert line.startswith("error: process ") and " is training in gs://bucket/runs/x: wait for it to end" in line
    assert "Traceback" not in err and time.monotonic() - began < 45
    first.kill()
    first.communicate()
    step = max(line["step"] for line in read_jsonl(to_path(RUN) / "metrics.jsonl"))
    again = start(config, home=tmp_path / "two")
    wait_for(bucket, step + 100, again)
    again.terminate()
    out, err = again.communicate(timeout=300)
    assert again.returncode == 75 and "stopped and saved at step" in out, err
    steps = [line["step"] for line in read_jsonl(to_path(RUN) / "metrics.jsonl") if line["split"] == "train"]
    assert steps == [*range(50, steps[-1] + 1, 50)] and not bucket.names("runs/x/lock/")


@pytest.mark.slow("starts two processes that train, twice")
def test_hosts_without_a_shared_disk(bucket, tmp_path):
    """The losses are those of one host, and of a run that has been stopped and goes on."""
    write_corpus(tmp_path / "text")
    upload(tmp_path / "text", CORPUS)
    config = small_config(f"{CORPUS}/*.txt", tmp_path / "cache")
    config.data.update(tokenizer="sentencepiece", vocab_size=320, cache_dir=CACHE)
    train(config, tmp_path / "alone")
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            hosts = f"--hosts=127.0.0.1:{free.getsockname()[1]},2"
        processes = [start(config, f"{hosts},{i}", home=tmp_path / str(i), devices=4) for i in range(2)]
        outputs = [process.communicate(timeout=300) for process in processes]
        for process, (_, err) in zip(processes, outputs, strict=True):
            assert not process.returncode, err[-3000:]
        there, here = losses(to_path(RUN)), losses(tmp_path / "alone")
        assert [line[:2] for line in there] == [line[:2] for line in here]
        np.testing.assert_allclose([line[2] for line in there], [line[2] for line in here], rtol=1e-5)
        assert not bucket.names("runs/x/lock/")
        bucket.storage.delete_file("bucket", f"runs/x/checkpoints/12{COMMITTED}")
    assert "step 9 of 12" in outputs[0][0] and not outputs[1][0]


TOKENISE = """
import sys
from small import small_config
from flash_lm.config.experiment import parse
from flash_lm.data import shared_tokenising
from flash_lm.data.token_cache import load_tokenized
from flash_lm.runs.hosts import join, parse_hosts
shared_tokenising._BLOCK = 1000
join(*parse_hosts(sys.argv[1]))
load_tokenized(parse(small_config(*sys.argv[2:])).data)
"""


@pytest.mark.slow("starts two processes")
def test_hosts_without_a_shared_disk_tokenise_together(bucket, tmp_path):
    """Through the bucket, where in the end the files lie that one host writes."""
    path = write_corpus(tmp_path / "text", documents=60)
    load_tokenized(parse(small_config(path, tmp_path / "cache")).data)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        hosts = f"127.0.0.1:{free.getsockname()[1]},2"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])}
    processes = [
        python(
            "-c", TOKENISE, f"{hosts},{i}", path, CACHE, devices=1, env=environment | {"HOME": str(tmp_path / str(i))}
        )
        for i in range(2)
    ]
    for process in processes:
        finish(process)
    (folder,) = (tmp_path / "cache").iterdir()
    expected = {f"cache/{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    names = bucket.names("cache/")
    assert names == sorted([*expected, f"cache/{folder.name}/complete"])
    assert all(to_path(f"gs://bucket/{name}").read_bytes() == content for name, content in expected.items())
    for home in range(2):
        (copy,) = (tmp_path / str(home) / ".cache" / "flash_lm" / "gs" / "bucket" / "cache").iterdir()
        assert copy.name == folder.name
