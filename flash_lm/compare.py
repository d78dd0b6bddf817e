"""flash-lm compare runs/a runs/b [--step-time] [--format=pdf --width=single] [--prompt="def main("] [--out=FOLDER]."""

import argparse
import os
import pathlib
from collections.abc import Mapping, Sequence

from flash_lm.cli.figure_flags import add_figure_flags, figure_output
from flash_lm.cli.flags import add_cache_flag, add_plugins_flag, set_cache, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, positive
from flash_lm.config.addresses import is_remote
from flash_lm.errors import InputError
from flash_lm.report.figure import Output
from flash_lm.runs.run_name import RunName

_SPLITS = ("test", "validation")  # the first that has results


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm compare", description=main.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN[@best|@STEP]", help="runs that evaluate has scored")
    parser.add_argument("--split", help="split of the table; default: test, or validation if no run has results on it")
    parser.add_argument(
        "--step_time",
        action="store_true",
        help="time the steps of all runs side by side on this device, for the time axis and the table",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="with --step_time: turns of each run; default: 3")
    parser.add_argument("--out", type=local_path, help="folder for the files; default: comparison, beside the runs")
    parser.add_argument("--prompt", default="", help="a text for each run to continue, on the page")
    add_figure_flags(parser)
    add_plugins_flag(parser)
    add_cache_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Compares runs: a table, the best first; perplexity against steps, time and FLOPs; and a page with all of it.

    The folder gets table.md and curves.png with their figures, results.jsonl and validation.jsonl; and index.html,
    which also has what differs in the configs, and opens without a network. Runs that differ only in their seed share a
    curve with a band, and get a mean with an interval. With --prompt the page has how each run continues this text.
    """
    arguments = flags().parse_args(argv)
    output = figure_output(arguments)  # raises
    use_plugins(arguments)
    set_cache(arguments)
    from flash_lm.report.results import labels

    names = labels(arguments.runs)
    split = arguments.split or _first_split(arguments.runs)
    _compare(names, split, arguments, output)


def _first_split(runs: Sequence[str]) -> str:
    from flash_lm.report.results import newest_results

    return next((split for split in _SPLITS if newest_results(runs, split)), _SPLITS[0])


def _compare(names: Mapping[str, RunName], split: str, arguments: argparse.Namespace, output: Output) -> None:
    from flash_lm.config.experiment import fill_open_keys
    from flash_lm.report.comparison import write_comparison
    from flash_lm.report.page import write_page
    from flash_lm.report.results import newest_results
    from flash_lm.runs.jsonl import write_jsonl
    from flash_lm.runs.run_folder import RunFolder
    from flash_lm.timing.run_steps import step_flops, time_run_steps

    scored = {line["run"] for line in newest_results(list(names.values()), split)}
    if not scored:
        some = next(iter(names.values()))
        raise InputError(
            f"no run has results on {split}: score each first, as in flash-lm evaluate {some} --split={split}"
        )
    names = {label: name for label, name in names.items() if label in scored}
    out = arguments.out or _beside(list(names.values()))
    # What a step takes: its FLOPs by the shapes, and its time if it is asked for.
    flops = {label: step_flops(name) for label, name in names.items()}
    times = time_run_steps(names, arguments.rounds) if arguments.step_time else []
    step_s = {line["run"]: line["step_ms"] / 1000 for line in times}
    text = write_comparison(list(names.values()), split, out, step_s=step_s, flops=flops, output=output)
    if times:
        write_jsonl(out / "step_times.jsonl", times)
    # The page: also configs and continuations.
    samples = _samples(names, arguments.prompt) if arguments.prompt else {}
    pictures = [path for path in (out / "curves.png", out / "accuracy.png") if path.exists()]
    configs = {label: fill_open_keys(RunFolder(name.workdir).config.to_dict()) for label, name in names.items()}
    title = f"{len(names)} runs on the {split} split"
    write_page(out / "index.html", title, text or "", pictures, configs, samples, arguments.prompt)
    print(f"\n{text}\n\ncurves: {out / 'curves.png'}\npage: {out / 'index.html'}")


def _beside(names: Sequence[RunName]) -> pathlib.Path:
    """The folder `comparison` in the folder that all runs are in.

    Raises:
        InputError: a run is in a bucket, or they share no folder.
    """
    if any(is_remote(name.workdir) for name in names):
        raise InputError("some of the runs are in a bucket: give --out=FOLDER for the comparison")
    return pathlib.Path(os.path.commonpath([os.path.abspath(name.workdir.parent) for name in names])) / "comparison"


def _samples(names: Mapping[str, RunName], prompt: str) -> dict[str, str]:
    """How each run continues a text, or why it cannot."""
    from flash_lm.inference.api import load

    continuations = {}
    for label, name in names.items():
        try:
            continuations[label] = load(str(name)).generate(prompt, 100)
        except InputError as error:
            continuations[label] = f"none: {error}"
    return continuations


if __name__ == "__main__":
    run(main, flags)
