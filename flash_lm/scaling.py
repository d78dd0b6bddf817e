"""flash-lm scaling plan --config=… --families=… --budgets=… --out=FILE.py, then scaling fit RUN … --out=FOLDER."""

import argparse
import pathlib
from typing import Any

from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import split_words
from flash_lm.errors import InputError
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line, write_jsonl

_PLAN: Columns = {
    "run": ("name", "{}"),
    "parameters": ("parameters", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "FLOPs": ("flops", "{:.1e}"),
}
_ENDS = ((0, "low"), (1, "high"))
_CONSTANTS = ("E", "A", "B", "alpha", "beta", "exponent")


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm scaling", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="write a file of runs for flash-lm sweep")
    planning.add_argument("--config", required=True, help="base config of all runs")
    planning.add_argument("--families", required=True, help="families, separated by spaces or commas")
    planning.add_argument("--budgets", required=True, help="FLOPs of a run, such as 1e13, separated likewise")
    planning.add_argument("--out", required=True, type=pathlib.Path, help="the file to write")
    fitting = commands.add_parser("fit", help="fit a law to the results of each family")
    fitting.add_argument("runs", nargs="+", help="folders of runs; the newest result of each counts")
    fitting.add_argument("--split", default="test", choices=("validation", "test"), help="the split that was scored")
    fitting.add_argument("--out", required=True, type=pathlib.Path, help="folder for law.md and law.jsonl")
    return parser


def main(argv: list[str]) -> None:
    """Plans the runs of a scaling study, or fits a law to their results.

    A plan has, for each budget in FLOPs, all sizes with 4 to 100 tokens per parameter, by each family's FLOPs. A fit is
    L = E + A / N^α + B / D^β for each family, with 95 % intervals over resampled runs. The exponent is that of the best
    number of parameters for a budget. Learning rates are those of the config: tune them first (sweep --tune).
    """
    arguments, overrides = flags().parse_known_args(argv)
    if arguments.command == "plan":
        _plan(arguments, overrides)
    elif overrides:
        raise InputError(f"unknown argument {overrides[0]}: fit takes folders of runs, --split and --out")
    else:
        _fit(arguments.runs, arguments.split, arguments.out)


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from flash_lm.sweeps.scaling_plan import plan, sweep_file

    config: Any = load_config(arguments.config, overrides)
    try:
        budgets = [float(word) for word in split_words(arguments.budgets)]
    except ValueError:
        raise InputError(f"--budgets={arguments.budgets} must be numbers such as 1e13") from None
    if not config.model.vocab_size:
        raise InputError("a plan needs the number of words: set --config.model.vocab_size")
    runs = plan(config, split_words(arguments.families), budgets)
    if not runs:
        raise InputError(f"no size has 4 to 100 tokens a parameter at --budgets={arguments.budgets}: change them")
    arguments.out.write_text(sweep_file(arguments.config, overrides, runs), encoding="utf-8")
    print(markdown_table([vars(one) for one in runs], _PLAN))
    total = sum(one.flops for one in runs)
    print(f"\n{total:.2e} FLOPs in {len(runs)} runs: flash-lm sweep --config={arguments.out}")


def _fit(runs: list[str], split: str, out: pathlib.Path) -> None:
    import numpy as np

    from flash_lm.report.results import newest_results
    from flash_lm.sweeps.scaling_law import fit

    results, lines = newest_results(runs, split), []
    if not results:
        raise InputError(f"none of the runs has a result on the {split} split: score them with --split={split} first")
    # A law per family, with intervals from resampled runs.
    for family in dict.fromkeys(line["family"] for line in results):
        family_results = [line for line in results if line["family"] == family]
        sizes, losses = (np.array([line[key] for line in family_results], float) for key in ("parameters", "loss"))
        tokens = np.array([line["step"] * line["batch_tokens"] for line in family_results], float)
        try:
            fitted = fit(sizes, tokens, losses)
        except ValueError as error:
            raise InputError(f"{family}, {len(family_results)} runs: the fit {error}") from None
        values = {name: getattr(fitted.law, name) for name in _CONSTANTS}
        lows, highs = ({f"{name}_{end}": pair[i] for name, pair in fitted.intervals.items()} for i, end in _ENDS)
        lines.append({"family": family, "runs": len(family_results), **values, **lows, **highs})
    # Lines and table.
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "law.jsonl", lines)
    shown = [line | {name: _format_interval(line, name) for name in _CONSTANTS} for line in lines]
    text = markdown_table(shown, {name: (name, "{}") for name in ("family", "runs", *_CONSTANTS)})
    (out / "law.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def _format_interval(line: Line, name: str) -> str:
    return f"{line[name]:.3g} ({line[f'{name}_low']:.3g} to {line[f'{name}_high']:.3g})"


if __name__ == "__main__":
    run(main, flags)
