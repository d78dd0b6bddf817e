"""Docstrings of the package, which are plain text with `code` and indented examples, as reStructuredText."""

import re

from sphinx.application import Sphinx

_CODE = re.compile(r"`([^`]+)`(?=(\w?))")
_SIGNS = re.compile(r"([*|]|_(?!\w))")  # what reStructuredText would read as markup


def to_rst(lines: list[str]) -> list[str]:
    """Converts plain text to reStructuredText: marks code, escapes other markup, keeps indented blocks as literals.

    Interactive sessions, from >>> to an empty line, stay as they are.
    """
    converted: list[str] = []
    literal = session = False
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        session = bool(line) and (session or line.lstrip().startswith(">>> "))
        if session or (literal and (indented or not line)):
            converted.append(line)
            continue
        literal = indented and i > 0 and not lines[i - 1]
        if literal:
            converted += ["::", "", line]
            continue
        converted.append(_text(line))
    return converted


def _text(line: str) -> str:
    parts, end = [], 0
    for match in _CODE.finditer(line):
        parts += [_SIGNS.sub(r"\\\1", line[end : match.start()]), f"``{match[1]}``", "\\ " if match[2] else ""]
        end = match.end()
    return "".join([*parts, _SIGNS.sub(r"\\\1", line[end:])])


def _convert(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the conversion, which must run before napoleon parses the sections."""
    app.connect("autodoc-process-docstring", _convert, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
