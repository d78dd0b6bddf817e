"""The queue: each job is made once, whoever works at it, and survives a stop and a kill."""

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from small import ROOT

from flash_lm.errors import InputError, NonfiniteError, Stopped
from flash_lm.runs.jsonl import read_jsonl, read_lines, write_jsonl
from flash_lm.sweeps.jobs import Job, JobFolder, make_jobs, merge_job_files, read_job_lines, try_lock, write_job_lines
from studies.protocol import cores
from studies.protocol.queue import DONE, LONG, MOST_HOURS, NEXT, RUNNING, WAITING, select_queued, states

ABOUT = {"study_commit": "abc"}


def job(name, make=lambda folder, should_stop: [{"loss": 1.0}], hours=0.1, study_hash="same", is_ready=True):
    return Job(name, {"run": name}, study_hash, make, is_ready, hours=hours)


def make_queued_jobs(jobs_now, job_folder, about):
    """Makes the queued jobs, as studies/work.py does."""
    return make_jobs(lambda: select_queued(jobs_now()), job_folder, about)


def make_job_folder(folder, should_stop=bool):
    return JobFolder(folder / "out", folder / "queue", should_stop)


def lines_by_job(folder):
    return {file.stem: read_jsonl(file) for file in (folder / "out" / "runs").glob("*.jsonl")}


def test_jobs_are_made_in_order_as_they_become_ready(tmp_path):
    order = []

    def make(name):
        return lambda folder, should_stop: order.append(name) or [{"loss": 1.0}]

    def jobs():
        late = job("late", make("late"), is_ready="early" in lines_by_job(tmp_path))
        never = job("never", make("never"), hours=MOST_HOURS + 0.1)
        return [late, job("middle", make("middle")), job("early", make("early")), never]

    make_queued_jobs(jobs, make_job_folder(tmp_path), ABOUT)
    assert order == ["middle", "early", "late"] and lines_by_job(tmp_path).keys() == {*order}
    line = lines_by_job(tmp_path)["late"][0]
    assert (line["run"], line["loss"], line["study_commit"]) == ("late", 1.0, "abc")
    make_queued_jobs(jobs, make_job_folder(tmp_path), ABOUT)
    assert len(order) == 3


def test_a_job_is_only_made_with_what_was_known_when_it_was_listed(tmp_path):
    """Another process may find the rate between the two: the next listing has it."""
    listings = iter([[job("seed", is_ready=False), job("other")], [job("seed", study_hash="with the rate")], [], []])
    make_queued_jobs(lambda: next(listings), make_job_folder(tmp_path), ABOUT)
    assert lines_by_job(tmp_path)["seed"][0]["study_hash"] == "with the rate"


def test_what_an_older_commit_made_or_began_goes_on_under_its_hash(tmp_path):
    """Its lines and folders have the hash that it gives the job; hashes.json leads to that of today."""
    hashes = {"former": "today", "of another": "of today's other"}
    job_folder = make_job_folder(tmp_path)._replace(hashes=hashes)
    write_job_lines(job("made", study_hash="former"), [{"loss": 2.0}], job_folder)
    began = job_folder.runs / "began_former"
    began.mkdir(parents=True)

    def make(folder, should_stop):
        assert folder == began
        return [{"loss": 1.0}]

    jobs = [job("made", study_hash="today"), job("began", make, study_hash="today")]
    make_queued_jobs(lambda: jobs, job_folder, ABOUT)
    lines = lines_by_job(tmp_path)
    assert lines["made"] == [{"loss": 2.0, "run": "made", "study_hash": "former"}]
    assert lines["began"][0]["study_hash"] == "today" and not began.exists()
    for study_hash in ("else", "of today's other"):
        with pytest.raises(InputError, match="made.jsonl is of another config"):
            make_queued_jobs(lambda study_hash=study_hash: [job("made", study_hash=study_hash)], job_folder, ABOUT)


def test_jobs_may_follow_from_lines(tmp_path):
    jobs = lambda: [job("first"), *([job("second")] if lines_by_job(tmp_path) else [])]
    make_queued_jobs(jobs, make_job_folder(tmp_path), ABOUT)
    assert lines_by_job(tmp_path).keys() == {"first", "second"}


def test_a_failed_job_is_a_line_and_lines_of_another_config_an_error(tmp_path):
    def make(folder, should_stop):
        folder.mkdir(parents=True)
        write_jsonl(folder / "metrics.jsonl", [{"split": "train", "step": 40, "loss": 9.0, "tokens": 3}])
        raise NonfiniteError("the loss is nan")

    make_queued_jobs(lambda: [job("bad", make)], make_job_folder(tmp_path), ABOUT)
    (line,) = lines_by_job(tmp_path)["bad"]
    assert line["failed"] == "the loss is nan" and line["run"] == "bad"
    curves = read_jsonl(tmp_path / "out" / "curves" / "bad.jsonl")
    assert curves == [{"job": "bad", "schedule": ".", "split": "train", "step": 40, "loss": 9.0}]
    assert not (tmp_path / "queue" / "bad_same").exists()
    with pytest.raises(InputError, match="bad.jsonl is of another config"):
        make_queued_jobs(lambda: [job("bad", study_hash="other"), job("good")], make_job_folder(tmp_path), ABOUT)
    assert "good" in lines_by_job(tmp_path)  # one bad job does not block the others


def test_a_stopped_job_goes_on_where_it_was(tmp_path):
    def make(folder, should_stop):
        folder.mkdir(parents=True, exist_ok=True)
        steps = folder / "steps"
        for step in range(int(steps.read_text()) if steps.exists() else 0, 6):
            steps.write_text(str(step + 1))
            if should_stop():
                raise Stopped("stopped")
        return [{"steps": steps.read_text()}]

    calls = iter([False, False, False, True])
    with pytest.raises(Stopped):
        make_queued_jobs(lambda: [job("long", make)], make_job_folder(tmp_path, lambda: next(calls)), ABOUT)
    assert not lines_by_job(tmp_path) and (tmp_path / "queue" / "long_same" / "steps").read_text() == "3"
    make_queued_jobs(lambda: [job("long", make)], make_job_folder(tmp_path), ABOUT)
    assert lines_by_job(tmp_path)["long"][0]["steps"] == "6"


def test_what_another_process_has_begun_is_left_to_it(tmp_path):
    job_folder, jobs = (
        make_job_folder(tmp_path),
        [job("one"), job("two"), job("three", is_ready=False), job("four", hours=3.0)],
    )
    with try_lock(job_folder.lock(jobs[0])):
        make_queued_jobs(lambda: jobs, job_folder, ABOUT)
        job_states = states(jobs, job_folder)
    assert [state.word for state in job_states] == [RUNNING, DONE, WAITING, LONG]
    assert job_states[0].by == os.getpid()
    assert [state.word for state in states(jobs, job_folder)] == [NEXT, DONE, WAITING, LONG]


KILLED = """
    import os, pathlib, signal, sys
    sys.path.insert(0, {root!r})
    from flash_lm.sweeps import jobs
    from flash_lm.sweeps.jobs import Job, JobFolder, make_jobs
    def make(folder, should_stop):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "begun").touch()
        if {moment!r} == "training":
            os.kill(os.getpid(), signal.SIGKILL)
        return [{{"loss": 1.0}}] * 1000
    if {moment!r} == "writing":
        jobs.os.replace = lambda *files: os.kill(os.getpid(), signal.SIGKILL)  # before the rename
    folder = pathlib.Path({folder!r})
    job_folder = JobFolder(folder / "out", folder / "queue", bool)
    make_jobs(lambda: [Job("job", {{}}, "same", make)], job_folder)
"""


@pytest.mark.parametrize("moment", ["training", "writing"])
def test_a_kill_loses_no_job_and_leaves_no_half_of_one(tmp_path, moment):
    program = textwrap.dedent(KILLED).format(root=str(ROOT), folder=str(tmp_path), moment=moment)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not lines_by_job(tmp_path) and (tmp_path / "queue" / "job_same" / "begun").exists()

    def make(folder, should_stop):
        assert (folder / "begun").exists()  # it resumes what the killed process has left
        return [{"loss": 2.0}]

    make_queued_jobs(lambda: [job("job", make)], make_job_folder(tmp_path), ABOUT)
    assert [line["loss"] for line in lines_by_job(tmp_path)["job"]] == [2.0]


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_a_kill_while_files_are_put_together_loses_nothing(tmp_path, monkeypatch, stopped_at):
    """Nothing is made twice, and no reader sees half of the lines."""
    job_folder, jobs = make_job_folder(tmp_path), [job("one"), job("two")]
    make_queued_jobs(lambda: jobs, job_folder, ABOUT)
    lines, remove, calls = read_job_lines(job_folder.out), pathlib.Path.unlink, itertools.count(1)

    def unlink(path, *more, **options):
        if next(calls) == stopped_at:
            raise KeyboardInterrupt
        remove(path, *more, **options)

    monkeypatch.setattr(pathlib.Path, "unlink", unlink)
    with contextlib.suppress(KeyboardInterrupt):  # the third time it is finished
        merge_job_files(job_folder)
    monkeypatch.undo()
    assert sorted(read_job_lines(job_folder.out), key=str) == sorted(lines, key=str)
    assert all(job_folder.lines(job) for job in jobs)
    merge_job_files(job_folder)
    assert (
        read_job_lines(job_folder.out) == read_lines(job_folder.out / "runs.jsonl") == lines
        and not (job_folder.out / "runs").exists()
    )


WORKER = """
    import pathlib, sys, time
    sys.path.insert(0, {root!r})
    from studies.protocol.cores import one_core
    with one_core(pathlib.Path({queue!r})) as core:
        import os
        print(core, len(os.sched_getaffinity(0)), os.nice(0), flush=True)
        while True:
            time.sleep(0.01)
"""


def process_state(process):
    """The letter that the system has for a process: T where it is stopped."""
    return pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(process, stopped):
    end = time.monotonic() + 20
    while (process_state(process) == "T") != stopped:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_process_has_one_core_and_all_can_be_paused(tmp_path):
    program = textwrap.dedent(WORKER).format(root=str(ROOT), queue=str(tmp_path))
    start = lambda: subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    free = sorted(os.sched_getaffinity(0))
    workers = [start() for _ in free]
    try:
        reports = [list(map(int, worker.stdout.readline().split())) for worker in workers]
        assert sorted(core for core, _, _ in reports) == free
        assert all((width, nice) == (1, 19) for _, width, nice in reports)
        groups = [pathlib.Path(f"/proc/{worker.pid}/autogroup") for worker in workers]
        assert all(group.read_text().endswith("nice 19\n") for group in groups if group.exists())
        _, error = start().communicate(timeout=60)
        assert "each core has a process of the queue already" in error
        assert sorted(cores.pause(tmp_path)) == sorted(worker.pid for worker in workers)
        for worker in workers:
            wait_for_state(worker, stopped=True)
        _, error = start().communicate(timeout=60)
        assert "the queue is paused: run python -m studies resume first" in error
        assert sorted(cores.resume(tmp_path)) == sorted(worker.pid for worker in workers)
        for worker in workers:
            wait_for_state(worker, stopped=False)
        assert not cores.is_paused(tmp_path)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert cores.pause(tmp_path) == []
