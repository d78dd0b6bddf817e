"""The queue of the studies: long runs, made in the hours in which a machine has nothing else to do.

    python -m studies commit HEAD --data=$DATA         # once: the commit that makes the runs, in a checkout of its own
    python -m studies next --hours=1.5 --data=$DATA    # makes the next jobs on one core, at the lowest priority
    python -m studies status                           # what is done, running and left, with hours
    python -m studies pause                            # before a measurement; `resume` after it
    python -m studies time --rounds=30 --data=$DATA    # times of steps, with the queue paused and nothing else running
    python -m studies report                           # tables, verdicts, pictures and README's sentences

What is made, and in which order, is studies/controls/README.md.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.lib.timing import ROUNDS
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.errors import InputError, RunError
from flash_lm.runs.jsonl import Line, append_jsonl, read_lines
from studies.protocol import cores
from studies.protocol.checkout import checkout, commit_of, python_of

TREE = pathlib.Path(__file__).parents[1]
_PROGRAM = "studies.work"
# What a commit looks for in its folder of results -> what that is. Until 30 November 2026 quality was called `study`.
LINKS = {
    "controls": "controls/results",
    "quality": "quality/results",
    "study/runs/runs.jsonl": "quality/results/runs.jsonl",
}


def main(argv: list[str]) -> None:
    """Runs one of the commands above."""
    arguments = flags().parse_args(argv)
    COMMANDS[arguments.command](arguments)


def flags() -> argparse.ArgumentParser:
    """The commands and their flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        own = commands.add_parser(name, help=function.__doc__.splitlines()[0])  # type: ignore[union-attr]
        own.add_argument(
            "--root", type=local_path, default=TREE, help="of the repository, whose studies have the lines"
        )
        own.add_argument("--queue", type=local_path, default=TREE / "runs" / "queue", help="folder of runs in progress")
        if name in ("next", "commit", "time"):
            own.add_argument("--data", type=local_path, required=True, help="folder of the corpora")
        if name == "next":
            own.add_argument("--hours", type=_hours, required=True, help="after which it stops, and saves")
        if name == "time":
            own.add_argument("--rounds", type=positive, default=ROUNDS, help="in which the models take turns")
        if name == "commit":
            own.add_argument("name", help="of a commit, such as HEAD")
    return parser


def next_(arguments: argparse.Namespace) -> None:
    """Makes the next jobs that nobody has begun, until the time is up."""
    commits = _commits(arguments.root)
    if not commits or "study" in commits[-1]:
        raise InputError("no commit makes the runs yet: name one with python -m studies commit HEAD --data=…")
    place = checkout(TREE, commits[-1]["commit"], arguments.queue / "checkouts")
    words = [f"--hours={arguments.hours:g}", f"--commit={commits[0]['commit']}"]
    # A session of its own, whose priority can be the lowest: see studies.protocol.cores. So signals must be passed on.
    work = subprocess.Popen(_words(place, arguments, words), cwd=place, env=_environment(place), start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, lambda number, frame: work.send_signal(number))
    sys.exit(work.wait())


def commit(arguments: argparse.Namespace) -> None:
    """Names the commit that makes the runs from now on, if its first losses are those of the commits before."""
    from studies.protocol.first_losses import differences  # noqa: PLC0415 (imports JAX)

    name = commit_of(TREE, arguments.name)
    commits = _commits(arguments.root)
    if commits and commits[-1]["commit"] == name:
        raise InputError(f"{name} makes the runs already")
    place = checkout(TREE, name, arguments.queue / "checkouts")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "losses.json"
        words = _words(place, arguments, [f"--losses={file}"])
        if subprocess.run(words, cwd=place, env=_environment(place), start_new_session=True).returncode:
            raise RunError(f"the first losses at {name} could not be found")
        losses = json.loads(file.read_text(encoding="utf-8"))
    if problems := [problem for line in commits for problem in differences(line["losses"], losses)]:
        raise InputError.of([*problems, f"{name} computes something else, so it cannot continue the study"])
    append_jsonl(_commits_file(arguments.root), [{"commit": name, "losses": losses}])
    print(f"{name} makes the runs from now on")


def status(arguments: argparse.Namespace) -> None:
    """Shows what is done, running and left, with the hours of one core."""
    from studies.status import status_table  # noqa: PLC0415 (imports JAX)

    print(status_table(arguments.root, arguments.queue, _commits(arguments.root)))


def pause(arguments: argparse.Namespace) -> None:
    """Stops the processes of the queue where they are, so that something can be measured."""
    print(f"paused: {_processes(cores.pause(arguments.queue))}; python -m studies resume lets them go on")


def resume(arguments: argparse.Namespace) -> None:
    """Lets the processes of the queue go on."""
    print(f"goes on: {_processes(cores.resume(arguments.queue))}")


def time(arguments: argparse.Namespace) -> None:
    """Times the steps of the models that have lines, side by side on one core."""
    if not cores.is_paused(arguments.queue):
        raise InputError("the queue may be running, and would slow what is timed: run python -m studies pause first")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from studies.controls import data, design  # noqa: PLC0415 (imports JAX, which starts a thread for each core)

    texts = data.prepared(arguments.data, arguments.queue / "data")
    design.time_steps(texts, *design.folders(arguments.root), arguments.rounds)


def report(arguments: argparse.Namespace) -> None:
    """Writes tables, verdicts and pictures from the lines, and README's sentences from those."""
    # Each imports JAX.
    from studies.claims.page import write_claims  # noqa: PLC0415
    from studies.controls import design  # noqa: PLC0415
    from studies.controls.report import write_controls  # noqa: PLC0415
    from studies.findings import Results, page  # noqa: PLC0415
    from studies.quality import config as study  # noqa: PLC0415
    from studies.quality.report import write_study  # noqa: PLC0415

    controls, quality = design.folders(arguments.root)
    write_study(study.TITLE, study.get_hypotheses(), quality)
    print(write_controls(controls, quality))
    write_claims(arguments.root)
    readme = arguments.root / "README.md"
    readme.write_text(page(readme.read_text(encoding="utf-8"), Results(arguments.root)), encoding="utf-8")


COMMANDS = {
    "commit": commit,
    "next": next_,
    "status": status,
    "pause": pause,
    "resume": resume,
    "time": time,
    "report": report,
}


def _commits_file(root: pathlib.Path) -> pathlib.Path:
    return root / "studies" / "controls" / "results" / "commits.jsonl"


def _commits(root: pathlib.Path) -> list[Line]:
    """The commits that have made runs, the newest last; those with `study` made the runs of that older study."""
    return read_lines(_commits_file(root))


def _words(place: pathlib.Path, arguments: argparse.Namespace, words: Sequence[str]) -> list[str]:
    places = {"results": _links(arguments.root, arguments.queue), "queue": arguments.queue, "data": arguments.data}
    flags = [f"--{name}={place.absolute()}" for name, place in places.items()]
    return [str(python_of(place)), "-m", _PROGRAM, *flags, *words]


def _links(root: pathlib.Path, queue: pathlib.Path) -> pathlib.Path:
    """A folder with the results of studies, as links: what a commit may know is their names in it alone."""
    folder = queue / "results"
    for name, place in LINKS.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        new = link.with_name(f"{link.name}.{os.getpid()}")
        new.symlink_to((root / "studies" / place).resolve())
        os.replace(new, link)  # at no time without it: a process of the queue may be at work
    return folder


def _environment(place: pathlib.Path) -> dict[str, str]:
    """Without the network, and with the code of the checkout alone."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(place)}


def _processes(numbers: Sequence[int]) -> str:
    return ", ".join(f"process {number}" for number in numbers) or "no process is running"


def _hours(word: str) -> float:
    try:
        hours = float(word)
    except ValueError:
        hours = 0.0
    if not 0 < hours < 1000:
        raise argparse.ArgumentTypeError(f"{word} must be a number of hours above 0")
    return hours


if __name__ == "__main__":
    run(main)
