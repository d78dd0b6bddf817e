"""The queue: jobs of a study that wait for idle hours, the state of each, and the hashes of those who made them."""

import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from flash_lm.runs.json_file import load_json
from studies.protocol.jobs import Job, Place

MOST_HOURS = 2.0  # of a job in the queue; a longer one is listed and not made
HASHES = pathlib.Path(__file__).parents[1] / "hashes.json"
DONE, RUNNING, NEXT, WAITING, LONG = "done", "running", "next", "waiting", "long"
_LOCKS = pathlib.Path("/proc/locks")
_FLOCK = re.compile(r"FLOCK +ADVISORY +WRITE +(\d+) +[\da-f]+:[\da-f]+:(\d+) ")


class State(NamedTuple):
    """Of a job: done, running, next, waiting (for others that find its rate) or long (not queued); `by`: a process."""

    job: Job
    word: str
    by: int | None = None


def is_queued(job: Job) -> bool:
    """Whether the queue makes a job."""
    return job.hours <= MOST_HOURS


def read_hashes() -> dict[str, str]:
    """What is in studies/hashes.json: the hash that an older version gave a job -> today's."""
    return load_json(HASHES)


def states(jobs: Iterable[Job], place: Place) -> list[State]:
    """The state of each job, in the order of the jobs. It takes no lock, so it disturbs no process."""
    return [_state(job, place) for job in jobs]


def _state(job: Job, place: Place) -> State:
    if place.file(job).exists():
        return State(job, DONE)
    if (process := holder(place.lock(job))) is not None:
        return State(job, RUNNING, process)
    if not is_queued(job):
        return State(job, LONG)
    return State(job, NEXT if job.is_ready else WAITING)


def holder(path: pathlib.Path) -> int | None:
    """The process of this machine that holds the lock of a file; None: none does, or there is no file."""
    if not path.exists():
        return None
    inode = path.stat().st_ino
    held = {int(number): int(process) for process, number in _FLOCK.findall(_LOCKS.read_text(encoding="utf-8"))}
    process = held.get(inode)
    # Files of two disks may have one number, so the file must name the process, too.
    return process if process and path.read_text(encoding="utf-8").startswith(f"process {process} ") else None
