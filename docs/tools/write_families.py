"""Writes the tables of families into README.md and docs/layers.md, between their markers.

python docs/tools/write_families.py [--out=README.md --layers=docs/layers.md]
"""

import argparse
import pathlib
import re

from base_facts import CAPACITIES, base_facts, paper_link

from flash_lm.cli.run import run
from flash_lm.config.registry import FAMILIES
from flash_lm.errors import InputError
from flash_lm.report.marked_blocks import replace_block

_ROOT = pathlib.Path(__file__).parents[2]
_PAGE, _LAYERS = _ROOT / "README.md", _ROOT / "docs" / "layers.md"


def table() -> str:
    """One row per family: name, description, decode state at the size of configs/flash_base.py, paper."""
    text = [
        "| `model.family` | one layer | decode state per sequence, MB after 1k → 64k tokens | paper |",
        "|---|---|--:|---|",
    ]
    for name, row in FAMILIES.items():
        state, link = _megabytes(base_facts(name).state_bytes), f"docs/families/{name}.md"
        text.append(f"| [`{name}`]({link}) | {row.about} | {state} | {paper_link(name)} |")
    return "\n".join(text)


def _megabytes(states: dict[int, int]) -> str:
    if not states:
        return "does not decode"
    short, long = (f"{states[n] / 1e6:.2f}" if states[n] < 1e7 else f"{states[n] / 1e6:,.0f}" for n in CAPACITIES)
    return f"{short} → {long}" if short != long else f"{short}, constant"


def mixers() -> str:
    """One row per family, from the comment on its page: <!-- mixer: mixes by | positions | state -->."""
    text = ["| name | mixes by | positions inside | decode state |", "|---|---|---|---|"]
    for name in FAMILIES:
        about = (_ROOT / "docs" / "families" / f"{name}.md").read_text(encoding="utf-8")
        if not (comment := re.search(r"<!-- mixer: (.*) -->", about)):
            raise InputError(f"docs/families/{name}.md must have <!-- mixer: mixes by | positions | state -->")
        text.append(f"| `{name}` | {comment[1]} |")
    return "\n".join(text)


def layers(before: str) -> str:
    """docs/layers.md with the current table."""
    return replace_block(before, "mixers", "docs/tools/write_families.py", mixers())


def page(before: str) -> str:
    """README with the current table."""
    return replace_block(before, "families", "docs/tools/write_families.py", table())


def main(argv: list[str]) -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=_PAGE)
    parser.add_argument("--layers", type=pathlib.Path, default=_LAYERS)
    arguments = parser.parse_args(argv)
    arguments.out.write_text(page(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    arguments.layers.write_text(layers(_LAYERS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run(main)
