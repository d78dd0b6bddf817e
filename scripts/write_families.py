"""Writes the table of families into README.md, between its two markers.

python scripts/write_families.py [--out=README.md]
"""

import argparse
import pathlib

from flash_lm.cli.run import run
from flash_lm.config.registry import FAMILIES
from flash_lm.models.base_facts import CAPACITIES, base_facts, paper_link
from flash_lm.report.marked_blocks import replaced

_PAGE = pathlib.Path(__file__).parent.parent / "README.md"


def table() -> str:
    """One row per family: name, description, decode state at the size of configs/flash_base.py, paper."""
    text = [
        "| `model.family` | one layer | decode state of a row, MB after 1k → 64k tokens | paper |",
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


def page(before: str) -> str:
    """README with the current table."""
    return replaced(before, "families", "scripts/write_families.py", table())


def main(argv: list[str]) -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=_PAGE)
    arguments = parser.parse_args(argv)
    arguments.out.write_text(page(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run(main)
