"""The queue of the studies: long runs that a machine makes in its idle hours.

    python -m studies commit HEAD --data=$DATA         # once: the commit that makes the runs, in a separate checkout
    python -m studies next --hours=1.5 --data=$DATA    # makes the next jobs on one core, at the lowest priority
    python -m studies status                           # jobs that are done, running and left, with hours
    python -m studies pause                            # before a measurement; `resume` after it
    python -m studies time --rounds=30 --data=$DATA    # times of steps, with the queue paused and nothing else running
    python -m studies report                           # tables, verdicts, pictures and README's sentences

studies/controls/README.md lists the runs and their order.
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

from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.errors import InputError, RunError
from flash_lm.runs.jsonl import Line, append_jsonl, read_lines
from flash_lm.timing.turns import ROUNDS
from studies.protocol import cores
from studies.protocol.checkout import checkout, python_path, short_commit

TREE = pathlib.Path(__file__).parents[1]
_PROGRAM = "studies.work"
# Name that a commit looks for in its folder of results -> folder below studies/. Until 30 November 2026 the quality
# study was called `study`.
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
    """Returns the parser of the commands and their flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        subparser = commands.add_parser(name, help=function.__doc__.splitlines()[0])  # type: ignore[union-attr]
        subparser.add_argument(
            "--root", type=local_path, default=TREE, help="of the repository, whose studies have the lines"
        )
        subparser.add_argument(
            "--queue", type=local_path, default=TREE / "runs" / "queue", help="folder of runs in progress"
        )
        if name in ("next", "commit", "time"):
            subparser.add_argument("--data", type=local_path, required=True, help="folder of the corpora")
        if name == "next":
            subparser.add_argument("--hours", type=_hours, required=True, help="after which it stops, and saves")
        if name == "time":
            subparser.add_argument("--rounds", type=positive, default=ROUNDS, help="in which the models take turns")
        if name == "commit":
            subparser.add_argument("name", help="of a commit, such as HEAD")
    return parser


def next_(arguments: argparse.Namespace) -> None:
    """Makes the next jobs that nobody has begun, until the time is over."""
    commits = _commits(arguments.root)
    if not commits or "study" in commits[-1]:
        raise InputError("no commit makes the runs yet: name one with python -m studies commit HEAD --data=…")
    path = checkout(TREE, commits[-1]["commit"], arguments.queue / "checkouts")
    words = [f"--hours={arguments.hours:g}", f"--commit={commits[0]['commit']}"]
    # The worker leads a new session, whose priority can be the lowest (see studies.protocol.cores). So signals must be
    # passed on.
    work = subprocess.Popen(_command(path, arguments, words), cwd=path, env=_environment(path), start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: work.send_signal(number))
    sys.exit(work.wait())


def commit(arguments: argparse.Namespace) -> None:
    """Names the commit that makes the runs from now on, if its first losses are those of the commits before."""
    from studies.protocol.first_losses import differences  # noqa: PLC0415 (imports JAX)

    name = short_commit(TREE, arguments.name)
    commits = _commits(arguments.root)
    if commits and commits[-1]["commit"] == name:
        raise InputError(f"{name} makes the runs already")
    path = checkout(TREE, name, arguments.queue / "checkouts")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "losses.json"
        words = _command(path, arguments, [f"--losses={file}"])
        if subprocess.run(words, cwd=path, env=_environment(path), start_new_session=True).returncode:
            raise RunError(f"the first losses at {name} could not be found")
        losses = json.loads(file.read_text(encoding="utf-8"))
    if problems := [problem for line in commits for problem in differences(line["losses"], losses)]:
        raise InputError.of([*problems, f"{name} computes something else, so it cannot continue the study"])
    append_jsonl(_commits_file(arguments.root), [{"commit": name, "losses": losses}])
    print(f"{name} makes the runs from now on")


def status(arguments: argparse.Namespace) -> None:
    """Prints which jobs are done, running and left, with the hours of one core."""
    from studies.status import status_table  # noqa: PLC0415 (imports JAX)

    print(status_table(arguments.root, arguments.queue, _commits(arguments.root)))


def pause(arguments: argparse.Namespace) -> None:
    """Pauses the processes of the queue, so that something can be measured."""
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

    texts = data.prepare_texts(arguments.data, arguments.queue / "data")
    design.time_steps(texts, *design.folders(arguments.root), arguments.rounds)


def report(arguments: argparse.Namespace) -> None:
    """Writes tables, verdicts and pictures from the lines, and README's sentences from those."""
    # Each imports JAX.
    from studies.claims.page import write_claims  # noqa: PLC0415
    from studies.controls import design  # noqa: PLC0415
    from studies.controls.report import write_controls  # noqa: PLC0415
    from studies.findings import Results, render_readme  # noqa: PLC0415
    from studies.quality import config as study  # noqa: PLC0415
    from studies.quality.report import write_study  # noqa: PLC0415

    controls, quality = design.folders(arguments.root)
    write_study(study.TITLE, study.get_hypotheses(), quality)
    print(write_controls(controls, quality))
    write_claims(arguments.root)
    readme = arguments.root / "README.md"
    readme.write_text(render_readme(readme.read_text(encoding="utf-8"), Results(arguments.root)), encoding="utf-8")


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


def _command(place: pathlib.Path, arguments: argparse.Namespace, words: Sequence[str]) -> list[str]:
    places = {
        "results": _link_results(arguments.root, arguments.queue),
        "queue": arguments.queue,
        "data": arguments.data,
    }
    flags = [f"--{name}={place.absolute()}" for name, place in places.items()]
    return [str(python_path(place)), "-m", _PROGRAM, *flags, *words]


def _link_results(root: pathlib.Path, queue: pathlib.Path) -> pathlib.Path:
    """Links the results of the studies into a folder, by the names that every commit knows; returns the folder."""
    folder = queue / "results"
    for name, target in LINKS.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        new = link.with_name(f"{link.name}.{os.getpid()}")
        new.symlink_to((root / "studies" / target).resolve())
        os.replace(new, link)  # atomic, since a process of the queue may read it
    return folder


def _environment(path: pathlib.Path) -> dict[str, str]:
    """Returns environment variables: no network, and the code of the checkout alone."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(path)}


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
