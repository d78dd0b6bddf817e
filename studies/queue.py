"""A queue of jobs, such as training runs, that several processes and many sessions share.

A job has a file of lines, which is written whole when the job is done. A lock says who is at it, and the system
releases that when the process ends, even by a kill. What was interrupted is next again, and goes on from its newest
checkpoint if there is one.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flash_lm.errors import NonfiniteError
from flash_lm.jsonl import Line, read_jsonl, write_jsonl
from flash_lm.shared_work import begun_here, is_made, write_made

MOST_HOURS = 2.0  # of a job in the queue; a longer one is listed and not made
_OF_A_CURVE = ("split", "step", "loss", "accuracy", "grad_norm", "learning_rate", "skipped_steps", "loss_spikes")
ShouldStop = Callable[[], bool]


class Place(NamedTuple):
    """Where a process works at a study.

    Attributes:
        out: folder of the study's lines: runs/ and curves/ have a file for each job.
        runs: folder for runs in progress and locks; processes of one machine share it.
        should_stop: called after every step; when it returns true, work stops where it is.
    """

    out: pathlib.Path
    runs: pathlib.Path
    should_stop: ShouldStop

    def file(self, name: str) -> pathlib.Path:
        """Of the lines of a job."""
        return self.out / "runs" / f"{name}.jsonl"

    def lock(self, name: str) -> pathlib.Path:
        """Of a job."""
        return self.runs / f"{name}.lock"


class Job(NamedTuple):
    """One run: what is trained and scored in one go.

    Attributes:
        name: of its file of lines.
        about: what identifies its lines: part, run, seed.
        hours: of one core while the other one is busy, estimated.
        known: what the lines follow from, as a hash; lines of another are an error.
        needs: names of jobs that must be done before, such as those that find its rate.
        config: of the run; where a rate is not found yet, with the first that it may have.
        make: trains and scores in a folder, and returns the lines; raises NonfiniteError and Stopped.
    """

    name: str
    about: Line
    hours: float
    known: str
    needs: Sequence[str]
    config: Any
    make: Callable[[pathlib.Path, ShouldStop], list[Line]]

    @property
    def is_queued(self) -> bool:
        """Whether the queue makes it."""
        return self.hours <= MOST_HOURS


class State(NamedTuple):
    """Of a job: done, running, next, waiting (for the jobs it needs) or long (not queued); `by`: who is at it."""

    job: Job
    word: str
    by: str = ""


DONE, RUNNING, NEXT, WAITING, LONG = "done", "running", "next", "waiting", "long"


def work_off(jobs_now: Callable[[], Sequence[Job]], place: Place, about: Line) -> None:
    """Makes jobs, always the first that is missing, free and has what it needs, until none is left.

    Args:
        jobs_now: the jobs in the order of their worth; asked before each job, since further ones may follow from lines.
        place: where.
        about: added to each line.

    Raises:
        InputError: lines are of another config, or bad data.
        Stopped: it was asked to stop; the job can go on.
    """
    while any(_made(job, place, about) for job in jobs_now()):
        pass


def _made(job: Job, place: Place, about: Line) -> bool:
    """Makes a job, if it is missing, free and has what it needs; says whether it did."""
    if not job.is_queued or not all(place.file(name).exists() for name in job.needs):
        return False
    with begun_here(place.lock(job.name)) as free:
        if not free or is_made(place.file(job.name), job.known):
            return False
        print(f"{job.name}, about {job.hours:.1f} hours", flush=True)
        folder = place.runs / job.name
        try:
            lines = job.make(folder, place.should_stop)
        except NonfiniteError as error:
            lines = [{"failed": str(error)}]
        curves = place.out / "curves" / f"{job.name}.jsonl"
        curves.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(curves, curves_in(folder))
        write_made(place.file(job.name), [line | job.about | about for line in lines], job.known)
        shutil.rmtree(folder, ignore_errors=True)
    return True


def curves_in(folder: pathlib.Path) -> list[Line]:
    """How the loss of each run in a folder fell, as far as it came: what is left of it when its weights are gone."""
    return [
        {
            "schedule": file.parent.relative_to(folder).as_posix(),
            **{key: line[key] for key in _OF_A_CURVE if key in line},
        }
        for file in sorted(folder.rglob("metrics.jsonl"))
        for line in read_jsonl(file)
    ]


def states(jobs: Iterable[Job], place: Place) -> list[State]:
    """The state of each job, in the order of the jobs."""
    return [_state(job, place) for job in jobs]


def _state(job: Job, place: Place) -> State:
    if place.file(job.name).exists():
        return State(job, DONE)
    lock = place.lock(job.name)
    if lock.exists():
        with begun_here(lock) as free:
            if not free:
                return State(job, RUNNING, lock.read_text(encoding="utf-8").strip())
    if not job.is_queued:
        return State(job, LONG)
    return State(job, NEXT if all(place.file(name).exists() for name in job.needs) else WAITING)
