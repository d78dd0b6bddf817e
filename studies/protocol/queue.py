"""The queue: short jobs of a study that run in idle hours, their states, and hashes of older versions.

Files of lines of the queue are not merged: the commit that makes the runs may only know one file per job.
"""

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from flash_lm.runs.json_file import load_json
from flash_lm.sweeps.jobs import Job, JobFolder
from studies.protocol.locks import lock_holder

MOST_HOURS = 2.0  # of a job in the queue; a longer one is listed and not made
HASHES = pathlib.Path(__file__).parents[1] / "hashes.json"
DONE, RUNNING, NEXT, WAITING, LONG = "done", "running", "next", "waiting", "long"


class State(NamedTuple):
    """State of a job: done, running, next, waiting (its rate is not known yet) or long (not queued).

    Attributes:
        job: the job.
        word: its state.
        by: id of the process that runs it.
    """

    job: Job
    word: str
    by: int | None = None


def select_queued(jobs: Iterable[Job]) -> list[Job]:
    """Returns the jobs that are short enough for the queue."""
    return [job for job in jobs if job.hours <= MOST_HOURS]


def read_hashes() -> dict[str, str]:
    """Returns studies/hashes.json: the hash that an older version gave a job -> today's hash."""
    return load_json(HASHES)


def states(jobs: Iterable[Job], job_folder: JobFolder) -> list[State]:
    """Returns the state of each job, in order. It takes no lock, so it disturbs no process."""
    return [_state(job, job_folder) for job in jobs]


def _state(job: Job, job_folder: JobFolder) -> State:
    if job_folder.file(job).exists():
        return State(job, DONE)
    if (process := lock_holder(job_folder.lock(job))) is not None:
        return State(job, RUNNING, process)
    if not select_queued([job]):
        return State(job, LONG)
    return State(job, NEXT if job.is_ready else WAITING)
