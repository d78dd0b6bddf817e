"""Paths at gs:// addresses: what is refused, leases, files that grow, and copies on this machine."""

import dataclasses
import errno
import json
import os
import pathlib
import random
import sys

import aiohttp
import pytest
from hosts_in_threads import run_on_hosts
from small import write_corpus

from flash_lm.config.data import DataConfig
from flash_lm.data.files import find_files, with_local_files
from flash_lm.data.token_cache import KnownCorpus, load_tokenized
from flash_lm.errors import InputError, PassingError, RunError
from flash_lm.runs import local_copy
from flash_lm.runs.jsonl import append_jsonl, read_jsonl
from flash_lm.runs.lease import LEASE_S, Lease
from flash_lm.runs.local_copy import GrowingFiles, copy_path, fetch
from flash_lm.runs.lock import lock_folder
from flash_lm.runs.saved_steps import saved_steps
from flash_lm.runs.storage import explain_errors, move_folder, object_store, reach, remove_folder, to_path, upload
from flash_lm.training.loggers import LoggedRun, TensorBoard
from flash_lm.training.metrics import MetricsWriter

LOCK = "gs://bucket/run/lock"


def test_a_path_is_local_or_an_address(bucket, tmp_path):
    assert type(to_path(tmp_path)) is type(tmp_path)
    for name in ("gs://bucket/runs/x", "gs://bucket/runs/x/", pathlib.Path("gs://bucket/runs/x")):
        assert str(to_path(name)) == "gs://bucket/runs/x"
    with pytest.raises(InputError, match=r"^s3://bucket/x: s3:// is not supported: use gs://, or mount it"):
        to_path("s3://bucket/x")


def test_what_the_object_store_refuses_is_one_line(bucket):
    with pytest.raises(InputError, match=r"^gs://other/x: there is no bucket other: make it, or correct the name$"):
        reach("gs://other/x")
    with pytest.raises(InputError, match=r"^gs:// names no bucket"):
        reach("gs://")
    folder, growing = to_path("gs://bucket/run"), GrowingFiles(to_path("gs://bucket/run"))
    (growing.folder / "metrics.jsonl").write_text("{}\n")
    refused = r"^gs://bucket/\S+: no right to do this: log in with gcloud auth application-default login, and give .*$"
    bucket.forbidden = "GET .*/o$"  # to list objects
    with pytest.raises(InputError, match=refused):
        reach("gs://bucket/private")
    bucket.forbidden = "POST "  # to write objects
    with pytest.raises(InputError, match=refused), lock_folder(folder):
        pass
    with pytest.raises(InputError, match=refused):
        append_jsonl(folder / "results.jsonl", [{}])
    with pytest.raises(RunError, match=refused):
        growing.upload()
    bucket.forbidden = "GET .*/b/bucket$"  # to read the bucket's properties, which Orbax needs later
    with pytest.raises(InputError, match=refused), lock_folder(folder):
        pass
    assert bucket.names() == []
    with (
        pytest.raises(PassingError, match=r"^gs://bucket/x cannot be reached \(no route\): check login, project"),
        explain_errors("gs://bucket/x", RunError),
    ):
        raise aiohttp.ClientConnectionError("no route")


def test_errors_of_this_machine_are_not_those_of_the_network(bucket, tmp_path, monkeypatch):
    (to_path("gs://bucket/a") / "train.txt").write_text("text")

    def fill_disk(*unused, **keys):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as full:
        patch.setattr(object_store(), "get", fill_disk)
        fetch("gs://bucket/a")
    assert full.type is OSError
    (tmp_path / "copies" / "bucket" / "b").write_text("")  # where a folder of the copies should be
    (to_path("gs://bucket/b") / "train.txt").write_text("text")
    with pytest.raises(NotADirectoryError, match="copies/bucket/b"):
        fetch("gs://bucket/b/train.txt")


def test_a_missing_client_is_one_line(bucket, monkeypatch):
    object_store.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gcs", raising=False)
    with pytest.raises(InputError, match=r"^gcsfs is not installed, and this needs it: run pip install .*\[gcs\]"):
        reach("gs://bucket/x")
    assert str(to_path("gs://bucket/x")) == "gs://bucket/x"  # flags are read without it


class Clock:
    """The time of all machines; `sleep` lets it pass, and calls what happens meanwhile."""

    def __init__(self):
        self.time, self.meanwhile = 0.0, lambda: None

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.meanwhile()

    def lease(self) -> Lease:
        return Lease(to_path(LOCK), now=lambda: self.time, sleep=self.sleep)


def test_a_lease_that_is_renewed_is_not_taken(bucket):
    clock = Clock()
    ours, other = clock.lease(), clock.lease()
    assert ours.take() is None
    clock.meanwhile = ours.renew
    assert other.take() == f"process {os.getpid()} on {os.uname().nodename}"
    assert clock.time < 0.1 * LEASE_S
    ours.check()
    ours.release()
    assert bucket.names() == [] and other.take() is None


@pytest.mark.parametrize("renewals", [0, 2])  # by the other one: our next number is used, or it has been removed
def test_a_lease_that_is_not_renewed_is_taken_when_it_ends(bucket, renewals):
    clock = Clock()
    ours, other = clock.lease(), clock.lease()
    assert ours.take() is None and other.take() is None
    assert LEASE_S <= clock.time < 1.1 * LEASE_S
    # The first one may not write any more, knows why when it tries to renew, and leaves the lease of the other one.
    with pytest.raises(
        PassingError, match=r"^gs://bucket/run/lock: the lease was not renewed in time; this process ends"
    ):
        ours.check()
    for _ in range(renewals):
        other.renew()
    ours.renew()
    with pytest.raises(RunError, match=r"process \d+ on \S+ has taken over"):
        ours.check()
    ours.release()
    other.check()
    assert len(bucket.names()) == 1


@pytest.mark.parametrize("wakes_in", ["now", "pipe_file"])  # before it sees that it is late, or after
def test_a_lease_that_was_taken_and_released_does_not_come_back(bucket, monkeypatch, wakes_in):
    clock = Clock()
    ours, other, third = clock.lease(), clock.lease(), clock.lease()
    assert ours.take() is None

    def sleep_while_another_trains() -> None:
        assert other.take() is None
        other.release()
        assert bucket.names() == []

    if wakes_in == "now":
        sleep_while_another_trains()
    else:
        pipe_file, clock.time = object_store().pipe_file, LEASE_S - 1

        def wake(*arguments, **keys):
            monkeypatch.setattr(object_store(), "pipe_file", pipe_file)
            sleep_while_another_trains()
            return pipe_file(*arguments, **keys)

        monkeypatch.setattr(object_store(), "pipe_file", wake)
    ours.renew()
    with pytest.raises(RunError, match="has taken over" if wakes_in == "now" else "was not renewed in time"):
        ours.check()
    # What it releases at its end is not the lease of a third one, whose number may be the same.
    assert third.take() is None
    ours.release()
    third.check()
    assert len(bucket.names()) == 1


def test_of_two_processes_one_gets_the_lease(bucket, monkeypatch):
    """The second one looks before the first one takes the lease, and creates its object afterwards."""
    for renewals in (0, 2):  # the number that it has seen to be free is used, or it has been used and removed
        clock = Clock()
        ours, other = clock.lease(), clock.lease()

        def look(newest=other._newest, other=other, ours=ours, clock=clock, renewals=renewals):
            monkeypatch.setattr(other, "_newest", newest)
            assert ours.take() is None
            for _ in range(renewals):
                ours.renew()
            clock.meanwhile = ours.renew
            return 0, {}

        monkeypatch.setattr(other, "_newest", look)
        assert other.take() is not None
        ours.renew()
        ours.check()
        ours.release()
        assert bucket.names() == []


def test_a_renewal_whose_answer_was_lost(bucket):
    lease = Clock().lease()
    assert lease.take() is None and lease._create(2) and lease._create(2)
    assert not Clock().lease()._create(2) and bucket.names() == ["run/lock/00000002"]


def test_a_lock_that_the_first_host_cannot_take_ends_all(bucket, tmp_path, monkeypatch):
    def lock(workdir):
        with lock_folder(workdir):
            pass

    bucket.forbidden = "POST "
    first, other = run_on_hosts(monkeypatch, 2, lambda number: lock(to_path("gs://bucket/run")))
    assert type(first) is type(other) is InputError and "no right to do this" in str(first)
    assert str(other).endswith(f": {first}")
    (tmp_path / "file").write_text("")
    first, other = run_on_hosts(monkeypatch, 2, lambda number: lock(tmp_path / "file" / "run"))
    assert type(first) is NotADirectoryError and type(other) is RunError
    # Nobody holds it then.
    bucket.forbidden = None
    assert run_on_hosts(monkeypatch, 2, lambda number: lock(to_path("gs://bucket/run"))) == [None, None]


@pytest.mark.parametrize("name", ["run[1]", "run*/x"])
def test_a_run_whose_checkpoints_could_not_be_restored_does_not_begin(bucket, tmp_path, name):
    for workdir in (tmp_path / name, to_path(f"gs://bucket/{name}")):
        with pytest.raises(InputError, match=r"Orbax takes .* in a run's path for a glob"), lock_folder(workdir):
            pass
    assert bucket.names() == [] and not list(tmp_path.iterdir())


def test_a_run_that_has_lost_its_lease_writes_nothing(bucket):
    def check() -> None:
        raise RunError("lost")

    for act in (lambda writer: writer.write(1, "train", {"loss": 1.0}), MetricsWriter.flush, MetricsWriter.close):
        writer = MetricsWriter(to_path("gs://bucket/run"), step=0, steps=1, bar=False)
        writer._check_lock = check
        with pytest.raises(RunError, match="lost"):
            act(writer)
        assert bucket.names() == [] and (act is not MetricsWriter.close or not writer._files.folder.exists())


def test_files_that_grow_are_uploaded_when_they_have_changed(bucket):
    workdir = to_path("gs://bucket/run")
    for step in (1, 2):
        board = lambda folder, step=step: [TensorBoard(LoggedRun(folder, "run", "project", {}, step - 1))]
        writer = MetricsWriter(workdir, step=step - 1, steps=3, bar=False, open_loggers=board)
        writer.write(step, "train", {"loss": 0.5})
        writer.upload()
        writer.write(3, "train", {"loss": 0.1})  # lost at the next start, which is from an earlier checkpoint
        bucket.requests.clear()
        writer.close()
        assert bucket.requests["POST upload"] == 2  # the lines, and the events of TensorBoard
    assert [line["step"] for line in read_jsonl(workdir / "metrics.jsonl")] == [1, 2, 3]
    assert bucket.names("run/tensorboard/")

    files = GrowingFiles(workdir, ["metrics.jsonl", "missing"])
    assert [path.name for path in files.folder.iterdir()] == ["metrics.jsonl"]
    for uploads in (1, 0):
        bucket.requests.clear()
        files.upload()
        assert bucket.requests["POST upload"] == uploads
    files.close()


def test_lines_are_added_to_an_object(bucket):
    for number in range(2):
        append_jsonl(to_path("gs://bucket/results.jsonl"), [{"number": number}])
    assert read_jsonl(to_path("gs://bucket/results.jsonl")) == [{"number": 0}, {"number": 1}]


def test_objects_are_copied_when_they_have_changed(bucket):
    for name in ("a/train.txt", "a/sub/test.txt", "ab/c.txt"):
        (to_path("gs://bucket") / name).write_text(name)
    folder = fetch("gs://bucket/a")
    assert {str(x.relative_to(folder)) for x in folder.rglob("*.txt")} == {"train.txt", "sub/test.txt"}
    assert [x.read_text() for x in sorted(folder.rglob("*.txt"))] == ["a/sub/test.txt", "a/train.txt"]

    # Another look reads only what has changed, and what has gone is removed.
    (to_path("gs://bucket/a") / "train.txt").write_text("new")
    bucket.storage.delete_file("bucket", "a/sub/test.txt")
    (folder / "train.txt").chmod(0o600)
    bucket.requests.clear()
    assert [x.read_text() for x in fetch("gs://bucket/a").rglob("*.txt")] == ["new"]
    read = bucket.requests["GET read"]
    fetch("gs://bucket/a")
    assert bucket.requests["GET read"] < 2 * read

    # A glob copies only what it matches, and splits are those of the names; a missing object leaves nothing.
    files = find_files(with_local_files(DataConfig(path="gs://bucket/*/[d-t]*.txt")).path)
    assert [(pathlib.Path(file.path).name, file.split) for file in files] == [("train.txt", "train")]
    assert not fetch("gs://bucket/none").exists()
    with pytest.raises(InputError, match=r"^no object matches data.path=gs://bucket/none/\*: give a file, a folder"):
        with_local_files(DataConfig(path="gs://bucket/none/*"))
    (problem,) = DataConfig(path="gs://bucket/a", corpus="hf", streaming=True, length=32).problems()
    assert problem.startswith("data.path=gs://bucket/a is copied to this machine, and data.streaming keeps nothing")


def test_names_with_the_characters_of_a_glob(bucket):
    """They are those of files and folders, and what they would match as globs is left alone."""
    root = to_path("gs://bucket")
    run, other = root / "run[1]", root / "run1"
    for folder in (run, other):
        for name in ("checkpoints/7/commit_success.txt", "checkpoints/7/state/commit_success.txt", "book?.txt"):
            (folder / name).write_text(folder.name)
    (root / "*.txt").write_text("named")
    (root / "b.txt").write_text("matched")
    assert saved_steps(run) == [7]
    assert fetch(run / "book?.txt").read_text() == "run[1]"
    (file,) = find_files(with_local_files(DataConfig(path="gs://bucket/*.txt")).path)
    assert pathlib.Path(file.path).read_text() == "named"
    assert {pathlib.Path(file.path).name for file in find_files(str(fetch(run)))} == {"book?.txt", "commit_success.txt"}
    # Only data.path may be a glob.
    bucket.storage.delete_file("bucket", "*.txt")
    assert not fetch("gs://bucket/*.txt").exists() and not copy_path("gs://bucket/b.txt").exists()
    (file,) = find_files(with_local_files(DataConfig(path="gs://bucket/*.txt")).path)
    assert pathlib.Path(file.path).read_text() == "matched"
    # What is moved and removed.
    before = bucket.names("run1/")
    move_folder(run / "checkpoints" / "7", run / "damaged" / "7")
    assert bucket.names("run[1]/") == [
        f"run[1]/{name}" for name in ("book?.txt", "damaged/7/commit_success.txt", "damaged/7/state/commit_success.txt")
    ]
    remove_folder(run)
    assert not bucket.names("run[1]/") and bucket.names("run1/") == before


def test_names_of_objects_do_not_lead_out_of_the_copies(bucket, monkeypatch):
    info = {"name": "bucket/books/../../../a", "type": "file", "size": 1, "updated": "2026-01-01T00:00:00Z"}
    monkeypatch.setattr(object_store(), "find", lambda *unused, **keys: {info["name"]: info})
    with pytest.raises(InputError, match=r"^gs://bucket/books/\.\./\.\./\.\./a leads out of its folder"):
        fetch("gs://bucket/books")


def test_a_large_file_is_uploaded_and_copied_in_parts(bucket, tmp_path):
    content = random.Random(0).randbytes(6 << 20)
    (tmp_path / "large").write_bytes(content)
    upload(tmp_path / "large", to_path("gs://bucket/large"))
    assert bucket.requests["POST upload"] > 1 and fetch("gs://bucket/large").read_bytes() == content


def test_a_cache_is_shared_by_machines(bucket, tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "text")
    config = DataConfig(corpus="text", path=path, tokenizer="sentencepiece", vocab_size=320, cache_dir="gs://bucket/c")

    copied, copy = [], local_copy._copy
    monkeypatch.setattr(local_copy, "_copy", lambda found, address: (copied.extend(found), copy(found, address))[1])

    def load(machine: str) -> bytes:
        monkeypatch.setattr("flash_lm.runs.local_copy._COPIES", str(tmp_path / machine))
        bucket.requests.clear()
        copied.clear()
        return load_tokenized(config).splits["train"].tokens.tobytes()

    tokens = load("one")
    assert bucket.requests["POST upload"] > 8
    assert load("two") == tokens and not bucket.requests["POST upload"] and copied
    for machine in ("two", "one"):  # neither copies anything again: one has uploaded it
        assert load(machine) == tokens and not bucket.requests["POST upload"] and not copied
    # A damaged folder is made again once for all.
    (name,) = (name for name in bucket.names("c/text-") if name.endswith("/train.tokens"))
    (to_path("gs://bucket") / name).write_bytes(tokens[:-2])
    assert load("two") == tokens and bucket.requests["POST upload"]
    assert object_store().cat_file(f"bucket/{name}") == tokens
    assert load("one") == tokens and not bucket.requests["POST upload"]
    # A run may go on without its corpus.
    corpus = load_tokenized(config)
    known = KnownCorpus(corpus.tokenizer, corpus.fingerprint)
    without = load_tokenized(dataclasses.replace(config, path="gs://bucket/gone/*.txt"), known)
    assert without.splits["train"].tokens.tobytes() == tokens
    # A folder whose last object is missing was not uploaded completely: it is made again.
    (info,) = (name for name in bucket.names("c/text-") if name.endswith("/complete"))
    bucket.storage.delete_file("bucket", info)
    bucket.storage.delete_file("bucket", info.replace("complete", "train.tokens"))
    assert load("three") == tokens and info in bucket.names()
    assert json.loads(object_store().cat_file(f"bucket/{info.replace('complete', 'info.json')}"))["counts"]
