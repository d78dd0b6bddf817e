"""Tables and figures of results, written by the build from the JSONL files of studies and benchmarks.

Each line of a table's body is a column: its heading, and how a cell is written, with fields of a result line as in
`{loss:.2f}` or, in other units, `{state_bytes/1e6:.2f}`:

    ```{results-table} benchmarks/decoding/results/decode.jsonl
    :where: batch=16
    :across: context
    :sort: ms_a_token

    family: `{family}`
    *: {ms_a_token:.1f}
    ```

Options: `where` keeps the lines with these values; `sort` orders them by a field, `-field` from the largest on; `only`
names the values of the first column, in their order. With `across`, lines that have the first column alike make one
row, and `*` is a column for each value of that field. A single figure in a sentence is a role:

    {result}`benchmarks/decoding/results/decode.jsonl | batch=16, family=flash, context=1024 | {ms_a_token:.1f} ms`
"""

import json
import os
import pathlib
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective, SphinxRole

_ROOT = pathlib.Path(__file__).parents[2]
_FIELD = re.compile(r"\{(\w+)(?:/([\d.e]+))?(?::([^}]*))?\}")
Line = dict[str, Any]


def read(path: str, where: str = "") -> list[Line]:
    """Reads the lines of a file that have these values, such as batch=16, family=flash."""
    lines = [json.loads(line) for line in (_ROOT / path).read_text(encoding="utf-8").splitlines()]
    for field, value in (part.strip().split("=", 1) for part in where.split(",") if part):
        lines = [line for line in lines if str(line.get(field)) == value]
    if not lines:
        raise ExtensionError(f"{path} has no line with {where}")
    return lines


def format_cell(form: str, line: Line) -> str:
    """Fills the fields of a form; returns an empty text if the line lacks one."""
    if any(line.get(field) is None for field, _, _ in _FIELD.findall(form)):
        return ""

    def value(match: re.Match) -> str:
        field, divisor, spec = match.groups()
        return format(line[field] / float(divisor) if divisor else line[field], spec or "")

    return _FIELD.sub(value, form)


def table(lines: list[Line], columns: dict[str, str], across: str | None) -> list[list[str]]:
    """Returns rows of cells, the headings first."""
    if not across:
        return [list(columns), *([format_cell(form, line) for form in columns.values()] for line in lines)]
    (heading, first), *others = ((name, form) for name, form in columns.items() if name != "*")
    values = list(dict.fromkeys(line[across] for line in lines))
    if not any(isinstance(value, str) for value in values):
        values.sort()  # as numbers, whatever the rows are sorted by
    rows: dict[str, dict[Any, Line]] = {}
    for line in lines:
        rows.setdefault(format_cell(first, line), {})[line[across]] = line
    cells = [[heading, *(f"{value:,}" if isinstance(value, int) else f"{value}" for value in values)]]
    cells[0] += [name for name, _ in others]
    for name, by_value in rows.items():
        last_cells = [format_cell(form, next(iter(by_value.values()))) for _, form in others]
        cells.append([name, *(format_cell(columns["*"], by_value.get(value, {})) for value in values), *last_cells])
    return cells


def _is_text(form: str, lines: list[Line]) -> bool:
    """Whether a column's fields are words, which are aligned to the left."""
    fields = [field for field, _, _ in _FIELD.findall(form)]
    return bool(fields) and all(isinstance(line.get(field, ""), str) for field in fields for line in lines)


def _sorted(lines: list[Line], field: str) -> list[Line]:
    name = field.lstrip("-")
    return sorted(lines, key=lambda line: line[name], reverse=field.startswith("-"))


class ResultsTable(SphinxDirective):
    """A table of a file of results, with a link to that file."""

    has_content = True
    required_arguments = 1
    option_spec = dict.fromkeys(("where", "across", "sort", "only"), directives.unchanged)

    def run(self) -> list[nodes.Node]:
        """Builds the table and the link to its file."""
        path, across = self.arguments[0], self.options.get("across")
        self.env.note_dependency(str(_ROOT / path))
        lines = read(path, self.options.get("where", ""))
        if "sort" in self.options:
            lines = _sorted(lines, self.options["sort"])
        columns = dict(line.split(": ", 1) for line in self.content if line)
        head, *rows = table(lines, columns, across)
        if "only" in self.options:
            names = [name.strip() for name in self.options["only"].split(",")]
            by_name = {row[0].strip("`"): row for row in rows}
            rows = [by_name[name] for name in names]
        forms = dict.fromkeys(head, "") | columns  # with `across`, a heading may be a value
        rule = [":--", *(":--" if _is_text(forms[name], lines) else "--:" for name in head[1:])]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])
        page = pathlib.Path(self.get_source_info()[0])  # of the included page, to which its links are relative
        target = pathlib.PurePosixPath(os.path.relpath(_ROOT / path, page.parent))
        source = f"Measured: [{path}]({target})."
        return self.parse_text_to_nodes(f"{text}\n\n{source}\n")


class Result(SphinxRole):
    """One figure, which links to its file."""

    def run(self):
        """The figure as a link."""
        path, where, form = (part.strip() for part in self.text.split("|"))
        self.env.note_dependency(str(_ROOT / path))
        lines = read(path, where)
        if len(lines) > 1:
            raise ExtensionError(f"{len(lines)} lines of {path} have {where}")
        target = "/" + str(pathlib.PurePosixPath("..") / path)
        link = addnodes.download_reference("", "", reftarget=target, refdoc=self.env.docname, refexplicit=True)
        link += nodes.inline("", format_cell(form, lines[0]))
        return [link], []


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive and the role."""
    app.add_directive("results-table", ResultsTable)
    app.add_role("result", Result())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
