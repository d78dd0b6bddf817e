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
from studies.protocol import cores
from studies.protocol.jobs import Job, Place, begun_here, made_lines, make_jobs, put_together, write_made
from studies.protocol.queue import DONE, LONG, MOST_HOURS, NEXT, RUNNING, WAITING, queued, states

ABOUT = {"study_commit": "abc"}


def job(name, make=lambda folder, should_stop: [{"loss": 1.0}], hours=0.1, known="same", is_ready=True):
    return Job(name, {"run": name}, known, make, is_ready, hours=hours)


def work_off(jobs_now, place, about):
    """As studies/work.py does."""
    return make_jobs(lambda: queued(jobs_now()), place, about)


def place(folder, should_stop=bool):
    return Place(folder / "out", folder / "queue", should_stop)


def made(folder):
    return {file.stem: read_jsonl(file) for file in (folder / "out" / "runs").glob("*.jsonl")}


def test_jobs_are_made_in_order_as_they_become_ready(tmp_path):
    order = []

    def make(name):
        return lambda folder, should_stop: order.append(name) or [{"loss": 1.0}]

    def jobs():
        late = job("late", make("late"), is_ready="early" in made(tmp_path))
        never = job("never", make("never"), hours=MOST_HOURS + 0.1)
        return [late, job("middle", make("middle")), job("early", make("early")), never]

    work_off(jobs, place(tmp_path), ABOUT)
    assert order == ["middle", "early", "late"] and made(tmp_path).keys() == {*order}
    line = made(tmp_path)["late"][0]
    assert (line["run"], line["loss"], line["study_commit"]) == ("late", 1.0, "abc")
    work_off(jobs, place(tmp_path), ABOUT)
    assert len(order) == 3


def test_a_job_is_only_made_with_what_was_known_when_it_was_listed(tmp_path):
    """Another process may find the rate between the two: the next listing has it."""
    listings = iter([[job("seed", is_ready=False), job("other")], [job("seed", known="with the rate")], [], []])
    work_off(lambda: next(listings), place(tmp_path), ABOUT)
    assert made(tmp_path)["seed"][0]["study_hash"] == "with the rate"


def test_what_an_older_commit_made_or_began_goes_on_under_its_hash(tmp_path):
    """Its lines and folders have the hash that it gives the job; hashes.json leads to that of today."""
    hashes = {"former": "today", "of another": "of today's other"}
    here = place(tmp_path)._replace(hashes=hashes)
    write_made(job("made", known="former"), [{"loss": 2.0}], here)
    began = here.runs / "began_former"
    began.mkdir(parents=True)

    def make(folder, should_stop):
        assert folder == began
        return [{"loss": 1.0}]

    jobs = [job("made", known="today"), job("began", make, known="today")]
    work_off(lambda: jobs, here, ABOUT)
    found = made(tmp_path)
    assert found["made"] == [{"loss": 2.0, "run": "made", "study_hash": "former"}]
    assert found["began"][0]["study_hash"] == "today" and not began.exists()
    for known in ("else", "of today's other"):
        with pytest.raises(InputError, match="made.jsonl is of another config"):
            work_off(lambda known=known: [job("made", known=known)], here, ABOUT)


def test_jobs_may_follow_from_lines(tmp_path):
    jobs = lambda: [job("first"), *([job("second")] if made(tmp_path) else [])]
    work_off(jobs, place(tmp_path), ABOUT)
    assert made(tmp_path).keys() == {"first", "second"}


def test_a_failed_job_is_a_line_and_lines_of_another_config_an_error(tmp_path):
    def make(folder, should_stop):
        folder.mkdir(parents=True)
        write_jsonl(folder / "metrics.jsonl", [{"split": "train", "step": 40, "loss": 9.0, "tokens": 3}])
        raise NonfiniteError("the loss is nan")

    work_off(lambda: [job("bad", make)], place(tmp_path), ABOUT)
    (line,) = made(tmp_path)["bad"]
    assert line["failed"] == "the loss is nan" and line["run"] == "bad"
    curves = read_jsonl(tmp_path / "out" / "curves" / "bad.jsonl")
    assert curves == [{"job": "bad", "schedule": ".", "split": "train", "step": 40, "loss": 9.0}]
    assert not (tmp_path / "queue" / "bad_same").exists()
    with pytest.raises(InputError, match="bad.jsonl is of another config"):
        work_off(lambda: [job("bad", known="other"), job("good")], place(tmp_path), ABOUT)
    assert "good" in made(tmp_path)  # one bad job does not block the others


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
        work_off(lambda: [job("long", make)], place(tmp_path, lambda: next(calls)), ABOUT)
    assert not made(tmp_path) and (tmp_path / "queue" / "long_same" / "steps").read_text() == "3"
    work_off(lambda: [job("long", make)], place(tmp_path), ABOUT)
    assert made(tmp_path)["long"][0]["steps"] == "6"


def test_what_another_process_has_begun_is_left_to_it(tmp_path):
    here, jobs = place(tmp_path), [job("one"), job("two"), job("three", is_ready=False), job("four", hours=3.0)]
    with begun_here(here.lock(jobs[0])):
        work_off(lambda: jobs, here, ABOUT)
        found = states(jobs, here)
    assert [state.word for state in found] == [RUNNING, DONE, WAITING, LONG]
    assert found[0].by == os.getpid()
    assert [state.word for state in states(jobs, here)] == [NEXT, DONE, WAITING, LONG]


KILLED = """
    import os, pathlib, signal, sys
    sys.path.insert(0, {root!r})
    from studies.protocol import jobs
    from studies.protocol.jobs import Job, Place, make_jobs
    def make(folder, should_stop):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "begun").touch()
        if {moment!r} == "training":
            os.kill(os.getpid(), signal.SIGKILL)
        return [{{"loss": 1.0}}] * 1000
    if {moment!r} == "writing":
        jobs.os.replace = lambda *files: os.kill(os.getpid(), signal.SIGKILL)  # all is written, but for the name
    folder = pathlib.Path({folder!r})
    place = Place(folder / "out", folder / "queue", bool)
    make_jobs(lambda: [Job("job", {{}}, "same", make)], place)
"""


@pytest.mark.parametrize("moment", ["training", "writing"])
def test_a_kill_loses_no_job_and_leaves_no_half_of_one(tmp_path, moment):
    program = textwrap.dedent(KILLED).format(root=str(ROOT), folder=str(tmp_path), moment=moment)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not made(tmp_path) and (tmp_path / "queue" / "job_same" / "begun").exists()

    def make(folder, should_stop):
        assert (folder / "begun").exists()  # what the killed one has left is there to go on from
        return [{"loss": 2.0}]

    work_off(lambda: [job("job", make)], place(tmp_path), ABOUT)
    assert [line["loss"] for line in made(tmp_path)["job"]] == [2.0]


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_a_kill_while_files_are_put_together_loses_nothing(tmp_path, monkeypatch, stopped_at):
    """Nor does it make anything twice; nobody reads a half."""
    here, jobs = place(tmp_path), [job("one"), job("two")]
    work_off(lambda: jobs, here, ABOUT)
    lines, remove, calls = made_lines(here.out), pathlib.Path.unlink, itertools.count(1)

    def unlink(path, *more, **options):
        if next(calls) == stopped_at:
            raise KeyboardInterrupt
        remove(path, *more, **options)

    monkeypatch.setattr(pathlib.Path, "unlink", unlink)
    with contextlib.suppress(KeyboardInterrupt):  # the third time it is finished
        put_together(here)
    monkeypatch.undo()
    assert sorted(made_lines(here.out), key=str) == sorted(lines, key=str)
    assert all(here.lines(job) for job in jobs)
    put_together(here)
    assert made_lines(here.out) == read_lines(here.out / "runs.jsonl") == lines and not (here.out / "runs").exists()


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


def state_of(process):
    """The letter that the system has for a process: T where it is stopped."""
    return pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def becomes(process, stopped):
    end = time.monotonic() + 20
    while (state_of(process) == "T") != stopped:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_process_has_a_core_of_its_own_and_all_can_be_paused(tmp_path):
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
        told = [list(map(int, worker.stdout.readline().split())) for worker in workers]
        assert sorted(core for core, _, _ in told) == free
        assert all((width, nice) == (1, 19) for _, width, nice in told)
        groups = [pathlib.Path(f"/proc/{worker.pid}/autogroup") for worker in workers]
        assert all(group.read_text().endswith("nice 19\n") for group in groups if group.exists())
        _, error = start().communicate(timeout=60)
        assert "each core has a process of the queue already" in error
        assert sorted(cores.pause(tmp_path)) == sorted(worker.pid for worker in workers)
        for worker in workers:
            becomes(worker, stopped=True)
        _, error = start().communicate(timeout=60)
        assert "the queue is paused: run python -m studies resume first" in error
        assert sorted(cores.resume(tmp_path)) == sorted(worker.pid for worker in workers)
        for worker in workers:
            becomes(worker, stopped=False)
        assert not cores.is_paused(tmp_path)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert cores.pause(tmp_path) == []
