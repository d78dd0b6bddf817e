"""The jobs of a study: runs, and searches of rates, that several processes share, over many days.

A job says what it needs, and has a lock, a hash of what its lines follow from, and a file of lines, which is written
whole when the job is done. The system releases a lock when its process ends, even by a kill: what was interrupted is
next again, and goes on from its newest checkpoint if there is one. The files of a study whose jobs are all made are put
together, so that its results are a few files.
"""

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flash_lm.errors import InputError, NonfiniteError, Stopped
from flash_lm.runs.jsonl import Line, read_jsonl, read_lines, write_jsonl
from flash_lm.runs.lock import take
from flash_lm.runs.provenance import config_hash
from flash_lm.runs.run_folder import run_hash

RUNS, RATES, PRETRAINING = "runs", "rates", "pretraining"  # kinds of jobs: folders of OUT, or files put together
CURVES = "curves"
_OF_A_CURVE = ("split", "step", "loss", "accuracy", "grad_norm", "learning_rate", "skipped_steps", "loss_spikes")
ShouldStop = Callable[[], bool]


def study_hash(config: Any, *more: Any) -> str:
    """A hash of twelve digits of what a run's lines follow from: its config, and more that JSON can hold."""
    return config_hash([run_hash(config.to_dict()), *more])


class Job(NamedTuple):
    """What is made in one go: a run that is trained and scored, or a search of a rate.

    Attributes:
        name: of its file of lines.
        about: what identifies its lines, such as part, run, seed; it is added to them.
        known: a hash of what the lines follow from; lines of another are an error.
        make: works in a folder, and returns the lines; raises NonfiniteError and Stopped.
        is_ready: whether all that it follows from is there, such as its rate.
        kind: of job: `RUNS`, `RATES` or `PRETRAINING`.
        is_lost: it is made, but weights that others need are gone, so it is made again.
        hours: of one core while the other one is busy, estimated; 0: unknown.
        config: of a run; where a rate is not found yet, with the first that it may have.
    """

    name: str
    about: Line
    known: str
    make: Callable[[pathlib.Path, ShouldStop], list[Line]]
    is_ready: bool = True
    kind: str = RUNS
    is_lost: bool = False
    hours: float = 0.0
    config: Any = None


class Place(NamedTuple):
    """Where a process works at a study.

    Attributes:
        out: folder of the study's lines.
        runs: folder for runs in progress and locks; processes of one machine share it.
        should_stop: called after every step; when it returns true, work stops where it is.
        hashes: the hash that an older version gave a job -> today's.
    """

    out: pathlib.Path
    runs: pathlib.Path
    should_stop: ShouldStop
    hashes: Mapping[str, str] = {}

    def file(self, job: Job) -> pathlib.Path:
        """The file of a job's lines."""
        return self.out / job.kind / f"{job.name}.jsonl"

    def lock(self, job: Job) -> pathlib.Path:
        """The file of a job's lock."""
        return self.runs / f"{_key(job)}.lock"

    def lines(self, job: Job) -> list[Line]:
        """The lines of a job, from its file or from those that are put together; empty: it is not made.

        Raises:
            InputError: they are of another config.
        """
        # In this order: a file goes only when its lines are among those that are put together.
        found, where = read_lines(self.file(job)), str(self.file(job))
        if not found:
            file = self.out / f"{job.kind}.jsonl"
            found, where = [x for x in read_lines(file) if job.about.items() <= x.items()], f"{job.name} in {file}"
        if job.is_ready and any(
            self.hashes.get(line.get("study_hash", ""), line.get("study_hash")) != job.known for line in found
        ):
            raise InputError(
                f"{where} is of another config, rate, texts or scores: write to another folder, or move its lines "
                "away, and it is made again"
            )
        return found


def made_lines(out: pathlib.Path, kind: str = RUNS) -> list[Line]:
    """The lines of all jobs of a kind that are made."""
    files = {file.stem: read_lines(file) for file in sorted((out / kind).glob("*.jsonl"))}
    together = [line for line in read_lines(out / f"{kind}.jsonl") if line.get("job") not in files]  # in this order
    return together + [line for own in files.values() for line in own if line not in together]


def make_jobs(jobs_now: Callable[[], Sequence[Job]], place: Place, about: Line | None = None) -> list[str]:
    """Makes jobs, always the first that is missing, free and ready, until none is left.

    Args:
        jobs_now: the jobs in the order of their worth; asked before each job, since further ones may follow from lines.
        place: where.
        about: added to each line.

    Returns:
        Names of the jobs that are left: another process has begun them, or they need what it is making.

    Raises:
        InputError: bad data, or lines of other configs; all other jobs have been made.
        Stopped: it was asked to stop; the job can go on.
    """
    problems: dict[str, str] = {}  # of jobs that are left out, so that one does not block the others
    while job := _next(jobs_now(), place, about or {}, problems):
        print(f"{_key(job)} is done", flush=True)
    if problems:
        raise InputError.of(problems.values())
    return [_key(job) for job in jobs_now() if job.is_lost or not place.lines(job)]


def _next(jobs: Sequence[Job], place: Place, about: Line, problems: dict[str, str]) -> Job | None:
    """Makes the first job that can be made, and returns it; adds to the problems of others."""
    for job in jobs:
        if place.should_stop():
            raise Stopped("stopped: run the same command again to continue")
        if not job.is_ready or _key(job) in problems:
            continue
        try:
            if _made(job, place, about):
                return job
        except InputError as error:
            problems[_key(job)] = f"{_key(job)}: {error}"
    return None


def _made(job: Job, place: Place, about: Line) -> bool:
    """Makes a job, if it is missing and free; says whether it did."""
    former = {today: known for known, today in place.hashes.items()}
    folder = place.runs / f"{_key(job)}_{former.get(job.known, job.known)}"  # what an older version began goes on
    with begun_here(place.lock(job)) as free:
        if not free:
            return False
        if place.lines(job) and not job.is_lost:
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed right after it wrote the lines
            return False
        print(f"{_key(job)}{f', about {job.hours:.1f} hours' if job.hours else ''}", flush=True)
        if job.is_lost:
            _forget(job, place)  # so that nothing uses its weights before they are whole again
        try:
            lines = job.make(folder, place.should_stop)
        except NonfiniteError as error:
            lines = [{"failed": str(error)}]
        if job.kind == RUNS and (curves := _curves(folder)):
            _write(place.out / CURVES / f"{job.name}.jsonl", [{"job": job.name, **line} for line in curves])
        write_made(job, [line | about for line in lines], place)
        shutil.rmtree(folder, ignore_errors=True)
    return True


def write_made(job: Job, lines: Sequence[Line], place: Place) -> None:
    """Writes the lines of a job, all or none."""
    _write(place.file(job), [line | job.about | {"study_hash": job.known} for line in lines])


def _write(file: pathlib.Path, lines: list[Line]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    write_jsonl(partial, lines)
    os.replace(partial, file)


def _forget(job: Job, place: Place) -> None:
    """Removes the lines of a job."""
    together = place.out / f"{job.kind}.jsonl"
    with _alone(place):
        if together.exists():
            _write(together, [line for line in read_jsonl(together) if not job.about.items() <= line.items()])
        place.file(job).unlink(missing_ok=True)


def _curves(folder: pathlib.Path) -> list[Line]:
    """How the loss of each run in a folder fell, as far as it came: what explains a score when the run is gone."""
    kept = lambda line: {key: line[key] for key in _OF_A_CURVE if key in line}
    return [
        {"schedule": file.parent.relative_to(folder).as_posix(), **kept(line)}
        for file in sorted(folder.rglob("metrics.jsonl"))
        for line in read_jsonl(file)
    ]


def finish(left: Sequence[str], place: Place) -> bool:
    """Says what `make_jobs` has left; or, if that is nothing, puts the files together and returns true."""
    if left:
        print(f"left to another process: {', '.join(left)}")
    else:
        put_together(place)
        print("all runs are made")
    return not left


def put_together(place: Place) -> None:
    """Puts the files of each kind of job together: runs/*.jsonl into runs.jsonl, and so on."""
    with _alone(place):
        for kind in (RUNS, RATES, PRETRAINING, CURVES):
            folder = place.out / kind
            if files := sorted(folder.glob("*.jsonl")):
                _write(place.out / f"{kind}.jsonl", made_lines(place.out, kind))
                for file in files:
                    file.unlink()
                with contextlib.suppress(OSError):  # another process writes there
                    folder.rmdir()


@contextlib.contextmanager
def _alone(place: Place) -> Iterator[None]:
    """Waits until no other process rewrites the files that are put together, which takes none of them long."""
    while True:
        with begun_here(place.runs / "together.lock") as free:
            if free:
                yield
                return
        time.sleep(0.1)


@contextlib.contextmanager
def begun_here(path: pathlib.Path) -> Iterator[bool]:
    """Whether this process may do what has a lock; another one cannot begin it until the block ends.

    Args:
        path: of the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        yield take(file) is None


def _key(job: Job) -> str:
    """The beginning of the names of its lock and its folder."""
    return job.name if job.kind == RUNS else f"{job.kind}_{job.name}"
