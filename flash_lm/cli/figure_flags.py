"""The flags of every command that draws figures: --format and --width."""

import argparse

from flash_lm.cli.types import split_words
from flash_lm.errors import InputError, one_of_names
from flash_lm.report.figure import FORMATS, WIDTHS, Output


def add_figure_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --format and --width, which `figure_output` reads."""
    parser.add_argument(
        "--format", default="png", help=f"of the figures: some of {', '.join(FORMATS)}, such as png,pdf; default: png"
    )
    parser.add_argument(
        "--width",
        choices=WIDTHS,
        default="screen",
        help="of the figures: a single or double column of a paper, without a title; default: as a screen has room",
    )


def figure_output(arguments: argparse.Namespace) -> Output:
    """The formats and the width; PNG is always among them, since pages show it.

    Raises:
        InputError: a format is unknown.
    """
    formats = split_words(arguments.format)
    for word in formats:
        if expected := one_of_names(word, FORMATS):
            raise InputError(f"--format={word} must be {expected}")
    return Output(tuple(dict.fromkeys(["png", *formats])), arguments.width)
