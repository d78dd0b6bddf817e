"""The queue: jobs of a study that wait for idle hours, the state of each, and the hashes of those who made them.

Its files of lines are not put together, since the commit that makes them may know files of their own alone.
"""

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from flash_lm.runs.json_file import load_json
from studies.protocol.jobs import Job, Place
from studies.protocol.locks import holder

MOST_HOURS = 2.0  # of a job in the queue; a longer one is listed and not made
HASHES = pathlib.Path(__file__).parents[1] / "hashes.json"
DONE, RUNNING, NEXT, WAITING, LONG = "done", "running", "next", "waiting", "long"


class State(NamedTuple):
    """Of a job: done, running, next, waiting (for others that find its rate) or long (not queued); `by`: a process."""

    job: Job
    word: str
    by: int | None = None


def queued(jobs: Iterable[Job]) -> list[Job]:
    """Those that the queue makes."""
    return [job for job in jobs if job.hours <= MOST_HOURS]


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
    if not queued([job]):
        return State(job, LONG)
    return State(job, NEXT if job.is_ready else WAITING)
