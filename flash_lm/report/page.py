"""Writes a comparison of runs as one HTML page that needs no other file and no network."""

import base64
import html
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.number, th.number { text-align: right; }
img { max-width: 100%; background: white; border-radius: .5rem; }
pre { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: 1rem; }
.dim { color: var(--dim); }
"""


def write_page(
    path: pathlib.Path,
    title: str,
    tables: str,
    pictures: Sequence[pathlib.Path],
    configs: Mapping[str, Mapping[str, Any]],
    samples: Mapping[str, str],
    prompt: str = "",
) -> None:
    """Writes the page: tables, curves, what differs between the runs' configs, and samples.

    Args:
        path: the file.
        title: its title.
        tables: Markdown tables, each below its title, as from `write_comparison`.
        pictures: PNG files, which the page contains.
        configs: the runs' configs by label, as nested values.
        samples: texts by the runs' labels; empty: the page has none.
        prompt: what the samples continue.
    """
    text = html.escape
    parts = [f"<h1>{text(title)}</h1>", *map(_table_of, tables.split("\n\n"))]
    parts += ["<h2>Curves</h2>", *map(_picture, pictures)]
    parts += ["<h2>What differs in the configs</h2>", _differences(configs)]
    if samples:
        parts.append(f"<h2>Samples</h2><p class=dim>Each continues: {text(prompt)}</p>")
        parts += [f"<h3>{text(label)}</h3><pre>{text(sample)}</pre>" for label, sample in samples.items()]
    # Style and pictures are part of the file.
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{text(title)}</title>'
    head = f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head>"
    path.write_text(f"{head}<body>{''.join(parts)}</body></html>\n", encoding="utf-8")


def _table_of(block: str) -> str:
    """A Markdown table, or a line of text above one."""
    lines = block.strip().splitlines()
    if not lines[0].startswith("|"):
        return f"<h2>{html.escape(block.strip())}</h2>"
    heading, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return _table(heading, rows, [cell.endswith(":") for cell in rule])


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [" class=number" * number for number in numbers]
        return "".join(f"<{tag}{k}>{html.escape(cell)}</{tag}>" for cell, k in zip(cells, kinds, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<div class=scroll><table><thead><tr>{row(heading, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def _picture(path: pathlib.Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'


def _differences(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The keys whose values differ between the runs, a row for each."""
    # Only keys that differ between the runs.
    flat = {label: flatten_dict(config, sep=".") for label, config in configs.items()}
    keys = sorted(set().union(*flat.values()))
    shown = {key: [_word(config, key) for config in flat.values()] for key in keys}
    rows = [[key, *words] for key, words in shown.items() if len(set(words)) > 1]
    if not rows:
        return "<p>Nothing.</p>"
    return _table(["key", *flat], rows, [False] * (len(flat) + 1))


def _word(config: Mapping[str, Any], key: str) -> str:
    if config.get(key) is None:
        return "open"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value)
