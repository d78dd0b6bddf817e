"""Writes docs/keys.md: every key with its default, its unit, and who reads it.

python docs/tools/write_keys.py [--config.plugins=my_package.families --out=keys.md]
"""

import argparse
import itertools
import pathlib

from flash_lm.cli.run import run
from flash_lm.cli.types import split_words
from flash_lm.config.experiment import Config
from flash_lm.config.keys import SECTIONS, key_names
from flash_lm.config.keys import keys as all_keys
from flash_lm.config.plugins import import_plugins
from flash_lm.config.registry import CORPORA, FAMILIES, HEADS, OPTIMIZERS, TASKS

_PAGE = pathlib.Path(__file__).parents[1] / "keys.md"
_HEAD = """# Keys

All config keys with their defaults.

`--config.KEY=VALUE` sets a key on the command line. An open key has no fixed default: its description says how it is
filled in. A key that a family ignores has no effect, and commands warn if you set one; but `model.head_dim`,
`model.feed_forward`, `model.output_gate`, `model.head_norm` and `model.biases=qkv`, without which a model would be
another, are refused where no layer reads them. `docs/tools/write_keys.py` writes this page from the declarations in
the code.
"""


def readers() -> dict[str, list[str]]:
    """Maps each key that not all rows read to the rows that read it."""
    readers_by_key: dict[str, list[str]] = {}
    for family, row in FAMILIES.items():
        for name in row.reads():
            readers_by_key.setdefault(name, []).append(family)
    others = [(name, row) for table in (HEADS, TASKS, CORPORA, OPTIMIZERS) for name, row in table.items()]
    for name, kind in ((name, kind) for name, row in others for kind in row.sections):
        for key in key_names(kind):
            readers_by_key.setdefault(key, []).append(name)
    for name, kind in ((name, SECTIONS[one]) for name, row in TASKS.items() for one in row.of_model):
        for key in key_names(kind):
            readers_by_key.setdefault(key, []).append(name)
    return readers_by_key


def page() -> str:
    """Returns the page."""
    who, text = readers(), [_HEAD]
    for group, keys in itertools.groupby(all_keys(Config), lambda one: one.name.rpartition(".")[0]):
        about = (SECTIONS[group].__doc__ or "").strip().splitlines()[0] if group in SECTIONS else ""
        text += [f"\n## {f'`{group}`' if group else 'The experiment'}\n"]
        text += [f"{about}\n"] if about and not about.startswith(f"{SECTIONS[group].__name__}(") else []
        text += ["| key | type | default | meaning | read by |", "|---|---|---|---|---|"]
        for one in keys:
            default = "open" if one.default is None else f"`{_short(one.default)}`"
            listed = ", ".join(f"`{name}`" for name in who.get(one.name, ())) or "all"
            unit = one.about["unit"].replace("|", "\\|")
            text.append(f"| `{one.name.rpartition('.')[2]}` | {one.kind.__name__} | {default} | {unit} | {listed} |")
    return "\n".join(text) + "\n"


def _short(default: object) -> str:
    text = f"{default}"
    return "…" if len(text) > 60 else text


def main(argv: list[str]) -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config.plugins", dest="plugins", default="", help="modules whose keys to include")
    parser.add_argument("--out", type=pathlib.Path, default=_PAGE)
    arguments = parser.parse_args(argv)
    import_plugins(split_words(arguments.plugins))
    arguments.out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    run(main)
