"""Jobs of a study: runs and learning-rate searches that several processes share, over many days.

Each job has a lock, a hash of everything that its lines depend on, and a file of lines that is written in one piece
when the job is done. The system releases a lock when its process ends, even when it is killed. An interrupted job is
the next to start, and resumes from its newest checkpoint. When all jobs of a study are done, their files are merged.
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
from flash_lm.runs.lock import hold
from flash_lm.runs.provenance import config_hash
from flash_lm.runs.run_folder import run_hash

RUNS, RATES, PRETRAINING = "runs", "rates", "pretraining"  # kinds of jobs: folders of OUT, or merged files
CURVES = "curves"
_CURVE_KEYS = ("split", "step", "loss", "accuracy", "grad_norm", "learning_rate", "skipped_steps", "loss_spikes")
ShouldStop = Callable[[], bool]


def study_hash(config: Any, *more: Any) -> str:
    """Returns twelve hex digits: a hash of a run's config and of further JSON values that its lines depend on."""
    return config_hash([run_hash(config.to_dict()), *more])


class Job(NamedTuple):
    """A unit of work: a run that is trained and scored, or a search for a rate.

    Attributes:
        name: name of its file of lines.
        about: keys that identify its lines, such as part, run, seed; they are added to each line.
        study_hash: hash of everything that the lines depend on; lines with another hash are an error.
        make: works in a folder and returns the lines; raises NonfiniteError and Stopped.
        is_ready: whether everything it needs is known, such as its rate.
        kind: `RUNS`, `RATES` or `PRETRAINING`.
        is_lost: finished, but its weights were deleted and another job needs them, so it is made again.
        hours: estimated hours of one core while the other core is busy; 0: unknown.
        config: config of a run; if its rate is not known yet, with the first rate it may get.
    """

    name: str
    about: Line
    study_hash: str
    make: Callable[[pathlib.Path, ShouldStop], list[Line]]
    is_ready: bool = True
    kind: str = RUNS
    is_lost: bool = False
    hours: float = 0.0
    config: Any = None


class JobFolder(NamedTuple):
    """The folders in which a process makes the jobs of a study.

    Attributes:
        out: folder of the study's lines.
        runs: folder for runs in progress and locks; the processes of one machine share it.
        should_stop: called after every step; when it returns true, work stops.
        hashes: the hash that an older version gave a job -> today's hash.
    """

    out: pathlib.Path
    runs: pathlib.Path
    should_stop: ShouldStop
    hashes: Mapping[str, str] = {}

    def file(self, job: Job) -> pathlib.Path:
        """Returns the path of a job's lines."""
        return self.out / job.kind / f"{job.name}.jsonl"

    def lock(self, job: Job) -> pathlib.Path:
        """Returns the path of a job's lock."""
        return self.runs / f"{_job_id(job)}.lock"

    def lines(self, job: Job) -> list[Line]:
        """Reads the lines of a job from its file or from the merged file; empty: the job is not done.

        Raises:
            InputError: the lines belong to another config.
        """
        # In this order: a job's file is removed only after its lines are in the merged file.
        lines, where = read_lines(self.file(job)), str(self.file(job))
        if not lines:
            file = self.out / f"{job.kind}.jsonl"
            lines, where = [x for x in read_lines(file) if job.about.items() <= x.items()], f"{job.name} in {file}"
        if job.is_ready and any(
            self.hashes.get(line.get("study_hash", ""), line.get("study_hash")) != job.study_hash for line in lines
        ):
            raise InputError(
                f"{where} is of another config, rate, texts or scores: write to another folder, or move its lines "
                "away, and it is made again"
            )
        return lines


def read_job_lines(out: pathlib.Path, kind: str = RUNS) -> list[Line]:
    """Reads the lines of all finished jobs of a kind, from the merged file and from files per job."""
    files = {file.stem: read_lines(file) for file in sorted((out / kind).glob("*.jsonl"))}
    # After the files per job: one that is merged in between is found in the merged file.
    merged = [line for line in read_lines(out / f"{kind}.jsonl") if line.get("job") not in files]
    return merged + [line for job_lines in files.values() for line in job_lines if line not in merged]


def make_jobs(jobs_now: Callable[[], Sequence[Job]], job_folder: JobFolder, about: Line | None = None) -> list[str]:
    """Makes jobs until none is left, always the first that is missing, unlocked and ready.

    Args:
        jobs_now: lists the jobs by priority; called before each job, since lines may lead to further jobs.
        job_folder: the study's folders.
        about: keys that are added to each line.

    Returns:
        Names of the jobs that are left: another process makes them, or they wait for its results.

    Raises:
        InputError: bad data, or lines of other configs; all other jobs have been made.
        Stopped: `should_stop` returned true; the job can be resumed.
    """
    problems: dict[str, str] = {}  # by job; these are skipped, so that one does not block the others
    while job := _make_next(jobs_now(), job_folder, about or {}, problems):
        print(f"{_job_id(job)} is done", flush=True)
    if problems:
        raise InputError.of(problems.values())
    return [_job_id(job) for job in jobs_now() if job.is_lost or not job_folder.lines(job)]


def _make_next(jobs: Sequence[Job], job_folder: JobFolder, about: Line, problems: dict[str, str]) -> Job | None:
    """Makes the first job that can be made and returns it; adds errors of others to `problems`."""
    for job in jobs:
        if job_folder.should_stop():
            raise Stopped("stopped: run the same command again to continue")
        if not job.is_ready or _job_id(job) in problems:
            continue
        try:
            if _make_if_free(job, job_folder, about):
                return job
        except InputError as error:
            problems[_job_id(job)] = f"{_job_id(job)}: {error}"
    return None


def _make_if_free(job: Job, job_folder: JobFolder, about: Line) -> bool:
    """Makes a job if it is missing and no other process has its lock; returns whether it did."""
    # A run that an older version began is resumed in the folder with its older hash.
    former = {today: known for known, today in job_folder.hashes.items()}
    folder = job_folder.runs / f"{_job_id(job)}_{former.get(job.study_hash, job.study_hash)}"
    with try_lock(job_folder.lock(job)) as free:
        if not free:
            return False
        if job_folder.lines(job) and not job.is_lost:
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed after it wrote the lines
            return False
        print(f"{_job_id(job)}{f', about {job.hours:.1f} hours' if job.hours else ''}", flush=True)
        if job.is_lost:
            _remove_lines(job, job_folder)  # so that nothing uses its weights before they are complete again
        # A run whose loss is not finite is a result: one line that says so.
        try:
            lines = job.make(folder, job_folder.should_stop)
        except NonfiniteError as error:
            lines = [{"failed": str(error)}]
        # Curves and lines are written before the run folder is removed.
        if job.kind == RUNS and (curves := _read_curves(folder)):
            _write(job_folder.out / CURVES / f"{job.name}.jsonl", [{"job": job.name, **line} for line in curves])
        write_job_lines(job, [line | about for line in lines], job_folder)
        shutil.rmtree(folder, ignore_errors=True)
    return True


def write_job_lines(job: Job, lines: Sequence[Line], job_folder: JobFolder) -> None:
    """Writes the lines of a job atomically."""
    _write(job_folder.file(job), [line | job.about | {"study_hash": job.study_hash} for line in lines])


def _write(file: pathlib.Path, lines: list[Line]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    write_jsonl(partial, lines)
    os.replace(partial, file)


def _remove_lines(job: Job, job_folder: JobFolder) -> None:
    """Removes the lines of a job from its file and from the merged file."""
    merged = job_folder.out / f"{job.kind}.jsonl"
    with _lock_merged_files(job_folder):
        if merged.exists():
            _write(merged, [line for line in read_jsonl(merged) if not job.about.items() <= line.items()])
        job_folder.file(job).unlink(missing_ok=True)


def _read_curves(folder: pathlib.Path) -> list[Line]:
    """Reads the training curves of the runs in a folder, also of unfinished ones; they outlast the run."""
    kept = lambda line: {key: line[key] for key in _CURVE_KEYS if key in line}
    return [
        {"schedule": file.parent.relative_to(folder).as_posix(), **kept(line)}
        for file in sorted(folder.rglob("metrics.jsonl"))
        for line in read_jsonl(file)
    ]


def finish(left: Sequence[str], job_folder: JobFolder) -> bool:
    """Prints the jobs that `make_jobs` has left; if none is left, merges the files and returns true."""
    if left:
        print(f"left to another process: {', '.join(left)}")
    else:
        merge_job_files(job_folder)
        print("all jobs are done")
    return not left


def merge_job_files(job_folder: JobFolder) -> None:
    """Merges the files of each kind of job: runs/*.jsonl into runs.jsonl, and so on."""
    with _lock_merged_files(job_folder):
        for kind in (RUNS, RATES, PRETRAINING, CURVES):
            folder = job_folder.out / kind
            if files := sorted(folder.glob("*.jsonl")):
                _write(job_folder.out / f"{kind}.jsonl", read_job_lines(job_folder.out, kind))
                for file in files:
                    file.unlink()
                with contextlib.suppress(OSError):  # another process writes there
                    folder.rmdir()


@contextlib.contextmanager
def _lock_merged_files(job_folder: JobFolder) -> Iterator[None]:
    """Waits until no other process rewrites the merged files, which takes little time."""
    while True:
        with try_lock(job_folder.runs / "together.lock") as free:
            if free:
                yield
                return
        time.sleep(0.1)


@contextlib.contextmanager
def try_lock(path: pathlib.Path) -> Iterator[bool]:
    """Yields True if this process got the lock of a file; it holds the lock until the block ends.

    Args:
        path: path of the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold(path) as holder:
        yield holder is None


def _job_id(job: Job) -> str:
    """Returns the job's id: its lock, its run folder and its messages are named by it."""
    return job.name if job.kind == RUNS else f"{job.kind}_{job.name}"
