"""flash-lm list families: the names of families, configs, tasks, corpora, optimizers, heads or formats."""

import argparse

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.load import packaged_configs
from flash_lm.cli.run import run
from flash_lm.config.registry import CORPORA, FAMILIES, FORMATS, HEADS, LOGGERS, OPTIMIZERS, TASKS, Table

_TABLES: dict[str, Table] = {
    "families": FAMILIES,
    "tasks": TASKS,
    "corpora": CORPORA,
    "optimizers": OPTIMIZERS,
    "heads": HEADS,
    "loggers": LOGGERS,
    "formats": FORMATS,
}


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm list", description=main.__doc__)
    parser.add_argument("what", choices=["configs", *_TABLES], help="what to list")
    add_plugins_flag(parser)
    return parser


def main(argv: list[str]) -> None:
    """Lists what a key may be set to, or the configs of the package with their presets, a line each."""
    arguments = flags().parse_args(argv)
    use_plugins(arguments)
    if arguments.what == "configs":
        for name, presets in packaged_configs().items():
            print(f"{name}:{{{','.join(presets)}}}" if presets else name)
        return
    table = _TABLES[arguments.what]
    width = max(map(len, table))
    print(f"{table.key} is one of")
    for name, row in table.items():
        print(f"  {name:<{width}}  {getattr(row, 'about', '')}".rstrip())


if __name__ == "__main__":
    run(main, flags)
