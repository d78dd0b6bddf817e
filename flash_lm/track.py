"""flash-lm track runs/x runs/y --to=trackio [--project=flash_lm]."""

import argparse

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.errors import InputError
from flash_lm.runs.run_name import RunName, run_name


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm track", description=main.__doc__)
    parser.add_argument("workdirs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--to", required=True, choices=("trackio", "wandb"), help="the tracker's package, which must be installed"
    )
    parser.add_argument("--project", default="flash_lm", help="the project there")
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Sends the metrics of runs to a tracker, each with its config; what was sent before is not sent again."""
    arguments = flags().parse_args(argv)
    from flash_lm.config.experiment import fill_open_keys
    from flash_lm.report.results import labels
    from flash_lm.runs.jsonl import read_lines
    from flash_lm.runs.run_folder import RunFolder
    from flash_lm.training.loggers import LoggedRun, Tracker, import_tracker, replay

    use_plugins(arguments)
    names = labels([_folder(word) for word in arguments.workdirs])
    metrics = {label: read_lines(name.workdir / "metrics.jsonl") for label, name in names.items()}
    if without := [str(names[label]) for label, lines in metrics.items() if not lines]:
        raise InputError(f"{', '.join(without)}: no run with metrics.jsonl is there; name the folders of runs")
    import_tracker(arguments.to)  # raises
    for label, lines in metrics.items():
        folder = names[label].workdir
        config = fill_open_keys(RunFolder(folder).config.to_dict())
        run = LoggedRun(folder, label, arguments.project, config, step=0)
        replay(lines, Tracker(arguments.to, run))
        print(f"{names[label]}: {len(lines)} lines to project {arguments.project} of {arguments.to}, as {label}")


def _folder(word: str) -> RunName:
    name = run_name(word)
    if name.suffix:
        raise InputError(f"{word} names a checkpoint, and the metrics are of the full run: leave {name.suffix} out")
    return name


if __name__ == "__main__":
    run(main, flags)
