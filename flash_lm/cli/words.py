"""The words of a command line, before a parser reads them: other spellings, and advice on mistyped flags."""

import argparse
import itertools
from collections.abc import Sequence

from flash_lm.config.renamed_keys import FOREIGN
from flash_lm.errors import InputError, nearest

_OVERRIDE = "--config."


def spell(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words as the parser takes them: --max_tokens for --max-tokens, KEY=VALUE for KEY VALUE, --workdir= for a run.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--workdir", metavar="RUN"), parser.add_argument("--max_tokens")
    >>> spell(parser, ["runs/mine", "--max-tokens=60", "--config.data.path", "books"])
    ['--workdir=runs/mine', '--max_tokens=60', '--config.data.path=books']
    """
    words, others = _split_off(parser, words)
    return _name_run(parser, _join_overrides([_underscored(parser, word) for word in words])) + others


def _split_off(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The parser's own words, and those of a command that it starts, if it does: from its first bare word on."""
    starts_another = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    first = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    end = first if starts_another else len(words)
    return list(words[:end]), list(words[end:])


def _underscored(parser: argparse.ArgumentParser, word: str) -> str:
    known, (flag, equals, value) = parser._option_string_actions, word.partition("=")
    ours = "--" + flag.removeprefix("--").replace("-", "_")
    return ours + equals + value if flag.startswith("--") and flag not in known and ours in known else word


def _join_overrides(words: Sequence[str]) -> list[str]:
    """A key and its value in one word, as all else expects them."""
    joined, rest = [], iter([*words, ""])
    pairs = itertools.pairwise(rest)
    for word, after in pairs:
        lacks_value = word.startswith(_OVERRIDE) and "=" not in word and after and not after.startswith("--")
        joined.append(f"{word}={after}" if lacks_value else word)
        if lacks_value:
            next(pairs)
    return joined


def _name_run(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Puts --workdir= before a run that stands alone, where the flag names an existing run."""
    flags = parser._option_string_actions
    named = flags.get("--workdir")
    is_named = any(word.partition("=")[0] == "--workdir" for word in words)
    if named is None or not str(named.metavar).startswith("RUN") or is_named:
        return words
    # A word after a flag that takes a value, and has none yet, is that value.
    is_value = False
    for i, word in enumerate(words):
        if not word.startswith("-") and not is_value:
            return [*words[:i], f"--workdir={word}", *words[i + 1 :]]
        meant = [flag for flag in flags if word.startswith("--") and flag.startswith(word)]
        is_value = bool(meant) and flags[meant[0]].nargs is None
    return words


def check_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Checks for mistyped flags, so that an error names the flag that was meant.

    Args:
        parser: the command's; one that takes overrides leaves unknown words to them, and so does this.
        words: from `spell`.

    Raises:
        InputError: a flag is unknown, and is much like one that the parser has.
    """
    known = [flag.removeprefix("--") for flag in parser._option_string_actions if flag.startswith("--")]
    problems = []
    for word in _split_off(parser, words)[0]:
        name, equals, value = word.removeprefix("--").partition("=")
        # The parser takes the beginning of a flag for it, too.
        is_known = any(flag.startswith(name) for flag in known) or word.startswith(_OVERRIDE) or name in FOREIGN
        if word.startswith("--") and not is_known and (near := nearest(name, known)):
            problems.append(f"unknown argument {word}: did you mean --{near}{equals}{value}?")
    if problems:
        raise InputError.of(problems)
