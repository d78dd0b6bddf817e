"""flash-lm keys model.chunks: what the keys of a config mean, their defaults, and who reads them."""

import argparse

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.key_lines import find_keys, key_lines, nearest_key
from flash_lm.cli.run import run
from flash_lm.errors import InputError


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm keys", description=main.__doc__)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="part of a name, or another library's name, such as lr"
    )
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Lists keys: their names, types, defaults and meanings, and who reads them if not all do."""
    arguments = flags().parse_args(argv)
    use_plugins(arguments)
    found = find_keys(arguments.words)
    if not found:
        near = next(filter(None, (nearest_key(word) for word in arguments.words)), None)
        advice = f"did you mean {near}?" if near else "flash-lm keys lists them all"
        raise InputError(f"no key has {' or '.join(arguments.words)} in its name: {advice}")
    print("\n".join(key_lines(found)))


if __name__ == "__main__":
    run(main, flags)
