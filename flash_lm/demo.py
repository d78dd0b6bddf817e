"""flash-lm demo: three small models on Python's own sources, and where each of them is ahead."""

import argparse
import pathlib
from typing import Any

from flash_lm.cli.flags import add_cache_flag, set_cache
from flash_lm.cli.run import run
from flash_lm.cli.types import local_path, parse_integers, positive
from flash_lm.errors import InputError, Stopped

FAMILIES = ("transformer_plus_plus", "flash_quad", "flash")
_TOKENS = 8192  # of a step whose time is measured: the longest sequence
_PROMPT = "import "
_NOTE = (
    "One seed, one learning rate for all, and few tokens: a first look and no verdict. docs/start.md says what changes "
    "with more tokens, studies/ has the comparisons with several seeds."
)


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm demo", description=main.__doc__)
    parser.add_argument(
        "--workdir", type=local_path, default=pathlib.Path("runs/demo"), help="folder for the runs; default: runs/demo"
    )
    parser.add_argument("--steps", type=positive, default=240, help="steps of each model; default: 240")
    parser.add_argument(
        "--lengths",
        default="512,1024,2048,4096,8192",
        help=f"sequence lengths whose step is timed: divisors of {_TOKENS}; default: 512 to {_TOKENS}",
    )
    add_cache_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Trains and scores FLASH, FLASH-Quad and Transformer++, times their steps from length 512 to 8192, and compares.

    It ends with tables, demo.png (perplexity against time, step time against length), a sentence on where each model is
    ahead, and a text. Run again, it continues where it stopped.
    """
    arguments = flags().parse_args(argv)
    from flash_lm.cli.load import load_config
    from flash_lm.sweeps.grid import run_study
    from flash_lm.training.interrupt import stop_on_signal

    lengths = parse_integers(arguments.lengths, "--lengths")
    if wrong := [length for length in lengths if _TOKENS % length]:
        raise InputError(f"--lengths={wrong[0]} must divide {_TOKENS}, such as 512 or 1024")
    set_cache(arguments)
    config = load_config("quickstart", [f"--config.train.steps={arguments.steps}"])
    with stop_on_signal() as should_stop:
        families = {family: {"model.family": family} for family in FAMILIES}
        run_study(config, families, arguments.workdir, "test", should_stop)
        if should_stop():
            raise Stopped
    _show(config, lengths, arguments.workdir)


def _show(config: Any, lengths: list[int], out: pathlib.Path) -> None:
    """Times the steps, writes and prints what the runs show, and continues a text."""
    from flash_lm.inference.api import load
    from flash_lm.report.comparison import write_comparison
    from flash_lm.report.demo import plot_demo, sentences, step_time_table
    from flash_lm.report.figure import can_draw
    from flash_lm.report.results import validation_curve
    from flash_lm.runs.jsonl import write_jsonl
    from flash_lm.runs.run_name import run_name
    from flash_lm.timing.by_length import time_by_length
    from flash_lm.timing.run_steps import time_run_steps

    model = load(out / "flash")
    config.model.vocab_size = model.config.model.vocab_size
    steps = time_by_length(config, FAMILIES, lengths, _TOKENS)
    write_jsonl(out / "step_times.jsonl", steps)
    # The runs were trained one after the other: their time axis has the times of steps that took turns.
    names = {family: run_name(out / family) for family in FAMILIES}
    step_s = {line["run"]: line["step_ms"] / 1000 for line in time_run_steps(names, rounds=1)}
    table = write_comparison([out / family for family in FAMILIES], "test", out, step_s=step_s)
    curves = {
        family: [line | {"rated_seconds": line["step"] * step_s[family]} for line in validation_curve(out / family)]
        for family in FAMILIES
    }
    if can_draw():
        plot_demo(curves, steps, model.config.data.length, out / "demo.png")
    print(f"\n{table}\n\n{step_time_table(steps)}\n")
    print("\n".join([*sentences(curves, steps), _NOTE]))
    print(f"\npicture: {out / 'demo.png'}\n\nflash continues {_PROMPT!r}:")
    print(_PROMPT + model.generate(_PROMPT, 60, temperature=0.7))


if __name__ == "__main__":
    run(main, flags)
