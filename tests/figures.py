"""Numbers in Markdown, computed from the linked files of results by the notes of the page.

studies/README.md has the syntax: `[2.9 times](x.jsonl)<!-- figure: speedup(family=flash) where length=8192 -->`.
"""

import ast
import fnmatch
import itertools
import json
import operator
import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from small import ROOT

GENERATED = re.compile(r"<!-- (\w+): written by python -m studies report -->.*?<!-- end of \1 -->", re.DOTALL)
LINK = re.compile(r"\[([^\]]*\d[^\]]*)\]\((?!\w+:)([\w./]+\.jsonl)\)")
NOTE = re.compile(r"<!--\s*(figure|holds|ratio)(?:\s+in\s+([\w./]+))?:\s(.*?)\s*-->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[−-]?\d(?:[\d,]*\d)?(?:\.\d+)?")
RATIO = re.compile(r"\d\.\d{3} \(\d\.\d{3}–\d\.\d{3}\)")
_TO_EACH = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne},
}


class FigureError(Exception):
    """A number that differs from its file, or a note that cannot be computed."""


class Column(dict[Any, Any]):
    """Values of several lines of a file, by the line's number, or by the fields in `by`."""

    def combine(self, other: Any, operation: Callable[[Any, Any], Any], swapped: bool = False) -> "Column":
        """Applies an operation to each value and another one; of two columns, to the values with the same keys."""
        others = other if isinstance(other, Column) else dict.fromkeys(self, other)
        pairs = {key: (value, others[key]) for key, value in self.items() if key in others}
        if not pairs:
            raise FigureError("two selections have no line in common: name the fields that they share in by=")
        return Column((key, operation(b, a) if swapped else operation(a, b)) for key, (a, b) in pairs.items())


def _apply(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if isinstance(a, Column):
        return a.combine(b, operation)
    return b.combine(a, operation, swapped=True) if isinstance(b, Column) else operation(a, b)


def _values(x: Any) -> list[Any]:
    return list(x.values()) if isinstance(x, Column) else [x]


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "min": lambda x: min(float(np.min(value)) for value in _values(x)),
    "max": lambda x: max(float(np.max(value)) for value in _values(x)),
    "abs": lambda x: Column((key, abs(value)) for key, value in x.items()) if isinstance(x, Column) else abs(x),
    "set": lambda x: set(_values(x)),
    "list": _values,
    "keys": lambda x: Column((key, key) for key, true in x.items() if true),
}


class _Expression:
    """One expression, with its file and the conditions of `where`."""

    def __init__(self, text: str, path: str | None, where: dict[str, Any]):
        self._path, self._where = path, where
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            raise FigureError(f"cannot be read: {text}") from None

    def result(self) -> Any:
        return self._evaluate(self._tree)

    def _evaluate(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=word):
                return word
            case ast.Tuple(elts=parts):
                return tuple(map(self._evaluate, parts))
            case ast.List(elts=parts):
                return [*map(self._evaluate, parts)]
            case ast.Set(elts=parts):
                return {*map(self._evaluate, parts)}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluate(operand)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _TO_EACH:
                return _apply(_TO_EACH[type(op)], self._evaluate(left), self._evaluate(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                ends = [self._evaluate(left), *map(self._evaluate, others)]
                truths = [
                    _apply(_COMPARED[type(op)], a, b) for op, (a, b) in zip(ops, itertools.pairwise(ends), strict=True)
                ]
                return truths[0] if len(truths) == 1 else all(map(_is_true, truths))
            case ast.BoolOp(op=ast.And(), values=parts):
                return all([_is_true(self._evaluate(part)) for part in parts])
            case ast.Call(func=ast.Name(id=name), args=[one], keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](self._evaluate(one))
            case ast.Call(func=ast.Name(id=field)) if field not in _FUNCTIONS:
                return self._select(self._path, field, node)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(path)), attr=field)):
                return self._select(path, field, node)
        raise FigureError(f"cannot be read: {ast.unparse(node)}")

    def _select(self, path: str | None, field: str, call: ast.Call) -> Any:
        """The values of a field in the lines that a call selects; a number, if it is one line."""
        if path is None:
            raise FigureError(f'{field} is of no file: write it behind a link, or as "FILE".{field}(…)')
        if not (ROOT / path).exists():
            raise FigureError(f"there is no file {path}")
        wanted = self._where | {word.arg: self._evaluate(word.value) for word in call.keywords}
        by = wanted.pop("by", None)
        lines = [json.loads(line) for line in (ROOT / path).read_text().splitlines()]
        line_keys = {id(line): (path, number) for number, line in enumerate(lines)}
        lines = [x for x in lines if field in x and all(k in x and _matches(x[k], v) for k, v in wanted.items())]
        for test in call.args:
            match test:
                case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[other]):
                    limit, compare = self._evaluate(other), _COMPARED[type(op)]
                    lines = [line for line in lines if name in line and compare(line[name], limit)]
                case _:
                    raise FigureError(f"selects nothing: {ast.unparse(test)}")
        if not lines:
            raise FigureError(f"{path} has no line for {ast.unparse(call)}")
        values = [np.array(line[field]) if isinstance(line[field], list) else line[field] for line in lines]
        if by is None:
            keys = [line_keys[id(line)] for line in lines]
            return values[0] if len(values) == 1 else Column(zip(keys, values, strict=True))
        names = by if isinstance(by, tuple) else (by,)
        keys = [tuple(line[name] for name in names) if len(names) > 1 else line[names[0]] for line in lines]
        if len(set(keys)) < len(keys):
            raise FigureError(f"{ast.unparse(call)} has several lines with the same {', '.join(names)}")
        return Column(zip(keys, values, strict=True))


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str) and "*" in wanted:
        return fnmatch.fnmatchcase(value, wanted)
    return value == wanted


def _is_true(statement: Any) -> bool:
    values = _values(statement)
    if not all(np.asarray(value).dtype == bool for value in values):
        raise FigureError("says nothing that holds or does not")
    return all(bool(np.all(value)) for value in values)


def results(text: str, path: str | None = None) -> Iterator[Any]:
    """Values of an expression, one per combination of the conditions in its `where`.

    Args:
        text: the expression.
        path: the file, from the repository's root, of fields that name none; None: no file.
    """
    expression, _, conditions = " ".join(text.split()).partition(" where ")
    parsed = _Expression(f"_({conditions})", None, {})._tree
    if not isinstance(parsed, ast.Call) or parsed.args:
        raise FigureError(f"cannot be read: where {conditions}")
    read = _Expression("0", None, {})
    where = {str(word.arg): read._evaluate(word.value) for word in parsed.keywords}
    several = {name: x if isinstance(x, tuple) and name != "by" else (x,) for name, x in where.items()}
    for values in itertools.product(*several.values()):
        yield _Expression(expression, path, dict(zip(several, values, strict=True))).result()


def holds(text: str, path: str | None = None) -> bool:
    """Whether a statement is true for its files."""
    return all([_is_true(value) for value in results(text, path)])


def check_figure(written: str, text: str, path: str | None, *, all_numbers: bool = False) -> None:
    """Raises FigureError unless the last numbers of a text equal an expression, rounded as they are written.

    Args:
        written: the text.
        text: the expression.
        path: the file, from the repository's root, of fields that name none.
        all_numbers: whether all its numbers must be computed.
    """
    (computed,) = results(text, path)
    values = computed if isinstance(computed, tuple) else (computed,)
    numbers = NUMBER.findall(written)
    if len(numbers) < len(values) or (all_numbers and len(numbers) > len(values)):
        raise FigureError(f"{len(values)} numbers are computed, and the page has {written!r}")
    for number, value in zip(numbers[len(numbers) - len(values) :], values, strict=True):
        plain = number.replace(",", "").replace("−", "-")
        digits = len(plain.partition(".")[2])
        if {f"{each:.{digits}f}" for each in _values(value)} != {plain}:
            raise FigureError(f"{number} should be {', '.join(f'{each:.{digits + 2}f}' for each in _values(value))}")


def check_page(page: str, ratios: dict[str, str], folder: str = "") -> dict[str, int]:
    """Checks all numbers of a page except those of generated parts; returns the count of each kind.

    Args:
        page: its text.
        ratios: ratios of claims, by "NAME / BASE".
        folder: folder of the page, from the repository's root; links are relative to it.

    Raises:
        FigureError: lists every number that differs from its file, or has no note.
    """
    page, wrong, counts = GENERATED.sub("", page), [], dict.fromkeys(("figure", "holds", "ratio"), 0)
    start, before = 0, ""  # start of the text of a note, and that text
    noted: set[int] = set()  # starts of the links and ratios with a note
    for note in NOTE.finditer(page):
        kind, path, text = note.groups()
        before = page[start : note.start()] or before  # a second note has the same text
        link = next((x for x in LINK.finditer(page, start, note.start()) if x.end() == note.start()), None)
        ratio = next((x for x in RATIO.finditer(page, start, note.start()) if x.end() == note.start()), None)
        start = note.end()
        counts[kind] += 1
        try:
            if kind == "holds":
                if not holds(text, path):
                    raise FigureError("does not hold")
            elif kind == "ratio":
                if ratio is None or ratio[0] != ratios.get(" ".join(text.split())):
                    raise FigureError(f"should stand behind {ratios.get(' '.join(text.split()))}")
                noted.add(ratio.start())
            elif link:
                noted.add(link.start())
                check_figure(link[1], text, posixpath.normpath(posixpath.join(folder, link[2])), all_numbers=True)
            else:
                check_figure(before, text, path)
        except FigureError as error:
            wrong.append(f"{before[-60:]!r} {text}: {error}")
    bare = [match for kind in (LINK, RATIO) for match in kind.finditer(page) if match.start() not in noted]
    wrong += [f"{match[0]} has no note that says how it is computed" for match in bare]
    if wrong:
        raise FigureError("\n".join(wrong))
    return counts
