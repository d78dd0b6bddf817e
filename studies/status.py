"""Status of the queue: jobs that are done, running and left."""

import pathlib
from collections.abc import Sequence

from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.jobs import JobFolder
from studies.controls import design
from studies.protocol import cores
from studies.protocol.queue import DONE, LONG, NEXT, RUNNING, WAITING, State, states

_COLUMNS: Columns = {
    "job": ("name", "{}"),
    "state": ("state", "{}"),
    "hours": ("hours", "{:.1f}"),
    "process": ("by", "{}"),
}
_LEFT = (RUNNING, NEXT, WAITING)
_WORDS = {DONE: "done", RUNNING: "running", NEXT: "next", WAITING: "waits for others", LONG: "too long to be queued"}


def status_table(root: pathlib.Path, queue: pathlib.Path, commits: Sequence[Line]) -> str:
    """Returns sums and a table of all jobs of this tree's design in their order, with estimated hours of one core.

    Args:
        root: root of the repository.
        queue: folder of runs in progress.
        commits: lines of the commits that have made runs, the newest last.
    """
    controls, quality = design.folders(root)
    jobs = design.jobs_now(design.Data(queue / "data"), design.read_counted_lines(controls, quality))
    job_states = states(jobs, JobFolder(controls, queue, lambda: False))
    left = [state for state in job_states if state.word in _LEFT]
    sums = [f"{len(left)} left, {_hours(left):.1f} hours of one core"]
    for word in (DONE, RUNNING, LONG):
        counted = [state for state in job_states if state.word == word]
        sums += [f"{len(counted)} {_WORDS[word]}, {_hours(counted):.1f}"] if counted else []
    named = bool(commits) and "study" not in commits[-1]
    made_by = f"by commit {commits[-1]['commit']}" if named else "no commit is named yet"
    paused = "; paused" if cores.is_paused(queue) else ""
    rows = [{"name": x.job.name, "state": _WORDS[x.word], "hours": x.job.hours, "by": x.by or ""} for x in job_states]
    return f"{'; '.join(sums)}; {made_by}{paused}\n\n{markdown_table(rows, _COLUMNS)}"


def _hours(job_states: Sequence[State]) -> float:
    return sum(state.job.hours for state in job_states)
