"""Types of command-line flags: counts, lists of numbers, meshes and paths."""

import argparse
import pathlib
import re

from flash_lm.config.addresses import address_problem, is_remote
from flash_lm.errors import InputError
from flash_lm.runs.storage import to_path

_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9}


def local_path(word: str) -> pathlib.Path:
    """Parses a file or folder of this machine: a type for argparse."""
    if is_remote(word) or address_problem(word):
        raise argparse.ArgumentTypeError(f"{word} must be on this machine: give a local path")
    return pathlib.Path(word)


def any_path(word: str) -> pathlib.Path:
    """Parses a file or folder of this machine, or at a gs:// address: a type for argparse."""
    try:
        return to_path(word)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(word: str) -> int:
    """Parses a positive integer: a type for argparse."""
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word} must be a positive integer")
    return int(word)


def count(word: str) -> int:
    """Parses a positive number, which may end in k, M or G, such as 1.5M: a type for argparse."""
    # A suffix is a factor; 1.5M is 1,500,000.
    digits, factor = (word[:-1], _FACTORS[word[-1]]) if word[-1:] in _FACTORS else (word, 1)
    try:
        number = round(float(digits.replace("_", "")) * factor)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a positive number such as 200000, 200k or 1.5M")
    return number


def split_words(text: str) -> list[str]:
    """Splits a list on the command line at commas or spaces."""
    return text.replace(",", " ").split()


def mesh_shapes(text: str, flag: str) -> list[tuple[int, ...]]:
    """Parses meshes: the numbers of devices along data, fsdp and tensor of each.

    Args:
        text: the numbers.
        flag: the flag's name, for the error message.

    Raises:
        InputError: the text is not a list of meshes.
    """
    words = split_words(text)
    if not words or len(words) % 3 or not all(re.fullmatch(r"-?\d+", word) for word in words):
        raise InputError(f"{flag}={text} must be three integers per mesh, such as 1,2,4")
    numbers = tuple(int(word) for word in words)
    return [numbers[i : i + 3] for i in range(0, len(numbers), 3)]


def parse_integers(words: str, flag: str = "") -> list[int]:
    """Parses one or more positive integers, separated by spaces or commas.

    Args:
        words: the numbers.
        flag: the flag's name, for the error message.

    Raises:
        InputError: the text is not such a list.
    """
    numbers = split_words(words)
    if not numbers or not all(number.isdecimal() and int(number) for number in numbers):
        argument = f"{flag}={words}" if flag else repr(words)
        raise InputError(f"{argument} must be positive integers, such as 512,2048")
    return [int(number) for number in numbers]
