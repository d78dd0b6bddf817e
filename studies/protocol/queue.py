"""A queue of jobs, such as training runs, that several processes share, over many days.

A job has a file of lines, which is written whole when the job is done. A lock says who is at it, and the system
releases that when the process ends, even by a kill. What was interrupted is next again, and goes on from its newest
checkpoint if there is one.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flash_lm.errors import InputError, NonfiniteError, Stopped
from flash_lm.runs.json_file import load_json
from flash_lm.runs.jsonl import Line, write_jsonl
from studies.protocol.jobs import begun_here, is_made, write_made
from studies.protocol.locks import holder
from studies.quality.run import ShouldStop, curves

HASHES = pathlib.Path(__file__).parents[1] / "hashes.json"
MOST_HOURS = 2.0  # of a job in the queue; a longer one is listed and not made


class Place(NamedTuple):
    """Where a process works at a study.

    Attributes:
        out: folder of the study's lines: runs/ and curves/ have a file for each job.
        runs: folder for runs in progress and locks; processes of one machine share it.
        should_stop: called after every step; when it returns true, work stops where it is.
        hashes: see `read_hashes`.
    """

    out: pathlib.Path
    runs: pathlib.Path
    should_stop: ShouldStop
    hashes: Mapping[str, str] = {}

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
        config: of the run; where a rate is not found yet, with the first that it may have.
        make: trains and scores in a folder, and returns the lines; raises NonfiniteError and Stopped.
        is_ready: whether all that it follows from is known, such as its rate.
    """

    name: str
    about: Line
    hours: float
    known: str
    config: Any
    make: Callable[[pathlib.Path, ShouldStop], list[Line]]
    is_ready: bool = True

    @property
    def is_queued(self) -> bool:
        """Whether the queue makes it."""
        return self.hours <= MOST_HOURS


class State(NamedTuple):
    """Of a job: done, running, next, waiting (for others that find its rate) or long (not queued); `by`: a process."""

    job: Job
    word: str
    by: int | None = None


DONE, RUNNING, NEXT, WAITING, LONG = "done", "running", "next", "waiting", "long"


def read_hashes() -> dict[str, str]:
    """What is in studies/hashes.json: the hash that an older version gave a job -> today's."""
    return load_json(HASHES)


def work_off(jobs_now: Callable[[], Sequence[Job]], place: Place, about: Line) -> None:
    """Makes jobs, always the first that is missing, free and ready, until none is left.

    Args:
        jobs_now: the jobs in the order of their worth; asked before each job, since further ones may follow from lines.
        place: where.
        about: added to each line.

    Raises:
        InputError: bad data, or lines of other configs; all other jobs have been made.
        Stopped: it was asked to stop; the job can go on.
    """
    problems: dict[str, str] = {}  # of jobs that are left out, so that one does not block the others
    while job := _next(jobs_now(), place, about, problems):
        print(f"{job.name} is done", flush=True)
    if problems:
        raise InputError.of(problems.values())


def _next(jobs: Sequence[Job], place: Place, about: Line, problems: dict[str, str]) -> Job | None:
    """Makes the first job that can be made, and returns it; adds to the problems of others."""
    for job in jobs:
        if place.should_stop():
            raise Stopped("stopped: run the same command again to continue")
        if not (job.is_queued and job.is_ready) or job.name in problems:
            continue
        try:
            if _made(job, place, about):
                return job
        except InputError as error:
            problems[job.name] = f"{job.name}: {error}"
    return None


def _made(job: Job, place: Place, about: Line) -> bool:
    """Makes a job, if it is missing and free; says whether it did."""
    former = {today: known for known, today in place.hashes.items()}
    folder = place.runs / f"{job.name}_{former.get(job.known, job.known)}"  # what an older version began goes on
    with begun_here(place.lock(job.name)) as free:
        if not free:
            return False
        if is_made(place.file(job.name), job.known, place.hashes):
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed right after it wrote the lines
            return False
        print(f"{job.name}, about {job.hours:.1f} hours", flush=True)
        try:
            lines = job.make(folder, place.should_stop)
        except NonfiniteError as error:
            lines = [{"failed": str(error)}]
        file = place.out / "curves" / f"{job.name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, curves(folder))
        write_made(place.file(job.name), [line | job.about | about for line in lines], job.known)
        shutil.rmtree(folder, ignore_errors=True)
    return True


def states(jobs: Iterable[Job], place: Place) -> list[State]:
    """The state of each job, in the order of the jobs. It takes no lock, so it disturbs no process."""
    return [_state(job, place) for job in jobs]


def _state(job: Job, place: Place) -> State:
    if place.file(job.name).exists():
        return State(job, DONE)
    if (process := holder(place.lock(job.name))) is not None:
        return State(job, RUNNING, process)
    if not job.is_queued:
        return State(job, LONG)
    return State(job, NEXT if job.is_ready else WAITING)
