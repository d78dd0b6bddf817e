"""flash-lm track runs/x runs/y --to=trackio [--project=flash_lm]."""

import argparse
import importlib
import itertools
from typing import Any

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.errors import InputError, missing_package
from flash_lm.runs.run_name import RunName, run_name

TRACKERS = ("trackio", "wandb")  # both have init, log and finish


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm track", description=main.__doc__)
    parser.add_argument("workdirs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--to", required=True, choices=TRACKERS, help="the tracker's package, which must be installed")
    parser.add_argument("--project", default="flash_lm", help="the project there")
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Replays the metrics of runs into a tracker: each run with its config, its steps and its splits."""
    arguments = flags().parse_args(argv)
    from flash_lm.config.experiment import fill_open_keys
    from flash_lm.report.results import labels
    from flash_lm.runs.jsonl import read_lines
    from flash_lm.runs.run_folder import RunFolder

    use_plugins(arguments)
    names = labels([_folder(word) for word in arguments.workdirs])
    metrics = {label: read_lines(name.workdir / "metrics.jsonl") for label, name in names.items()}
    if without := [str(names[label]) for label, lines in metrics.items() if not lines]:
        raise InputError(f"{', '.join(without)}: no run with metrics.jsonl is there; name the folders of runs")
    try:
        tracker = importlib.import_module(arguments.to)
    except ImportError:
        raise missing_package(arguments.to, arguments.to) from None
    for label, lines in metrics.items():
        config = fill_open_keys(RunFolder(names[label].workdir).config.to_dict())
        _replay(tracker, arguments.project, label, config, lines)
        print(f"{names[label]}: {len(lines)} lines to project {arguments.project} of {arguments.to}, as {label}")


def _folder(word: str) -> RunName:
    name = run_name(word)
    if name.suffix:
        raise InputError(f"{word} names a checkpoint, and the metrics are of the full run: leave {name.suffix} out")
    return name


def _replay(tracker: Any, project: str, label: str, config: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Logs the lines, those of one step together; a metric's name begins with its split."""
    tracker.init(project=project, name=label, config=config)
    for step, of_step in itertools.groupby(lines, lambda line: line["step"]):
        values = {
            f"{line['split']}/{key}": value
            for line in of_step
            for key, value in line.items()
            if key not in ("step", "split")
        }
        tracker.log(values, step=step)
    tracker.finish()


if __name__ == "__main__":
    run(main, flags)
