"""Writes the table of families into README.md, between its two markers.

python scripts/write_families.py [--out=README.md]
"""

import argparse
import pathlib
import re
from typing import Any

from flash_lm.command import run
from flash_lm.configs import flash_base
from flash_lm.models.facts import facts
from flash_lm.tables import FAMILIES

_PAGE = pathlib.Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- families: written by scripts/write_families.py -->", "<!-- end of families -->"
_SHORT, _LONG = 1024, 65536


def table() -> str:
    """One row per family: name, description, decode state at the size of configs/flash_base.py, paper."""
    config: Any = flash_base.get_config()
    config.model.vocab_size = config.data.vocab_size
    text = [
        "| `model.family` | one layer | decode state of a row, MB after 1k → 64k tokens | paper |",
        "|---|---|--:|---|",
    ]
    for name, row in FAMILIES.items():
        found = facts(name, config.model, (_SHORT, _LONG), ())
        paper = re.sub(r"(.*), arXiv:(\S+)", r"[\1](https://arxiv.org/abs/\2)", row.paper)
        section = f"docs/families/{name}.md"
        text.append(f"| [`{name}`]({section}) | {row.about} | {_megabytes(found.state_bytes)} | {paper} |")
    return "\n".join(text)


def _megabytes(states: dict[int, int]) -> str:
    if not states:
        return "does not decode"
    short, long = (f"{states[n] / 1e6:.2f}" if states[n] < 1e7 else f"{states[n] / 1e6:,.0f}" for n in (_SHORT, _LONG))
    return f"{short} → {long}" if short != long else f"{short}, constant"


def page(before: str) -> str:
    """README with the current table."""
    return re.sub(f"{_BEGIN}.*{_END}", lambda match: f"{_BEGIN}\n{table()}\n{_END}", before, flags=re.DOTALL)


def main(argv: list[str]) -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=_PAGE)
    arguments = parser.parse_args(argv)
    arguments.out.write_text(page(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run(main)
