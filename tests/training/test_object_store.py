"""A run whose folder, corpus and cache lie in an object store."""

import itertools
import pathlib
import time

import pytest
from small import small_config, write_corpus

import flash_lm
from flash_lm import evaluate, export
from flash_lm.errors import InputError, RunError
from flash_lm.inference.scoring import evaluate as score
from flash_lm.runs import lease
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.storage import to_path
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")
RUN, CORPUS, CACHE, EXPORT = (f"gs://bucket/{name}" for name in ("runs/x", "text", "cache", "exported/x"))


def losses(workdir) -> list[tuple[int, str, float]]:
    return [(line["step"], line["split"], line["loss"]) for line in read_jsonl(workdir / "metrics.jsonl")]


def upload(folder: pathlib.Path, address: str) -> None:
    for path in folder.iterdir():
        (to_path(address) / path.name).write_bytes(path.read_bytes())


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

    # Another process takes the run over, and is then silent; the newest checkpoint is as after a kill.
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    monkeypatch.setattr(lease, "RENEW_S", 0.2)

    def lose() -> bool:
        if next(steps) == 8:
            other = lease.Lease(to_path(f"{RUN}/lock"), now=lambda: time.time() + lease.LEASE_S)
            assert other.take() is None
            time.sleep(0.4)  # until it would be renewed
        return False

    steps = itertools.count(1)
    with pytest.raises(RunError, match=r"^gs://bucket/runs/x/lock: process \d+ on \S+ has taken over"):
        train(config, RUN, lose)
    there = losses(to_path(RUN))
    assert there == expected[: len(there)] and there[-1][0] == 6
    bucket.storage.delete_file("bucket", "runs/x/checkpoints/6/commit_success.txt")

    # The same command goes on from the checkpoint before, when the lease has ended; meanwhile nobody else may train.
    def try_to_train() -> bool:
        if next(steps) == 5:
            with pytest.raises(InputError, match=r"^process \d+ on .* is training in gs://bucket/runs/x: wait for it"):
                train(config, RUN)
        return False

    steps = itertools.count(1)
    assert train(config, RUN, try_to_train)
    assert losses(to_path(RUN)) == expected and not bucket.names("runs/x/lock/")
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
