"""Writes docs/keys.md: every key with its default, its unit, and who reads it.

python docs/tools/write_keys.py [--config.plugins=my_package.families --out=keys.md]
"""

import argparse
import itertools
import pathlib

from flash_lm.cli.key_lines import default_text, readers
from flash_lm.cli.run import run
from flash_lm.cli.types import split_words
from flash_lm.config.experiment import Config
from flash_lm.config.keys import SECTIONS
from flash_lm.config.keys import keys as all_keys
from flash_lm.config.plugins import import_plugins

_PAGE = pathlib.Path(__file__).parents[1] / "keys.md"
_HEAD = """# Keys

All config keys with their defaults.

`--config.KEY=VALUE` sets a key on the command line. An open key has no fixed default: its description says how it is
filled in. A key that a family ignores has no effect, and commands warn if you set one; but `model.head_dim`,
`model.feed_forward`, `model.output_gate`, `model.head_norm` and `model.biases=qkv`, without which a model would be
another, are refused where no layer reads them. `docs/tools/write_keys.py` writes this page from the declarations in
the code.
"""


def page() -> str:
    """Returns the page."""
    who, text = readers(), [_HEAD]
    for group, keys in itertools.groupby(all_keys(Config), lambda one: one.name.rpartition(".")[0]):
        about = (SECTIONS[group].__doc__ or "").strip().splitlines()[0] if group in SECTIONS else ""
        text += [f"\n## {f'`{group}`' if group else 'The experiment'}\n"]
        text += [f"{about}\n"] if about and not about.startswith(f"{SECTIONS[group].__name__}(") else []
        text += ["| key | type | default | meaning | read by |", "|---|---|---|---|---|"]
        for one in keys:
            default = "open" if one.default is None else f"`{default_text(one)}`"
            listed = ", ".join(f"`{name}`" for name in who.get(one.name, ())) or "all"
            unit = one.about["unit"].replace("|", "\\|")
            text.append(f"| `{one.name.rpartition('.')[2]}` | {one.kind.__name__} | {default} | {unit} | {listed} |")
    return "\n".join(text) + "\n"


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
