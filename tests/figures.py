"""Figures in Markdown, computed from the files of results that they link by what the page itself says beside them.

CONTRIBUTING.md has the grammar: `[2.9 times](x.jsonl)<!-- figure: speedup(family=flash) where length=8192 -->`.
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
    """A figure that is not what its file says, or says nothing that can be computed."""


class Column(dict[Any, Any]):
    """Values of several lines of a file, by the line's place, or by what `by` names."""

    def with_(self, other: Any, made: Callable[[Any, Any], Any], swapped: bool = False) -> "Column":
        """Of each value and another one; of two columns those with the same keys."""
        others = other if isinstance(other, Column) else dict.fromkeys(self, other)
        pairs = {key: (value, others[key]) for key, value in self.items() if key in others}
        if not pairs:
            raise FigureError("two selections have no line in common: name the fields that they share in by=")
        return Column((key, made(b, a) if swapped else made(a, b)) for key, (a, b) in pairs.items())


def _each(made: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if isinstance(a, Column):
        return a.with_(b, made)
    return b.with_(a, made, swapped=True) if isinstance(b, Column) else made(a, b)


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
    """One expression, with the file that it is about and what `where` says."""

    def __init__(self, text: str, path: str | None, where: dict[str, Any]):
        self._path, self._where = path, where
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:
            raise FigureError(f"cannot be read: {text}") from None

    def result(self) -> Any:
        return self._of(self._tree)

    def _of(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=word):
                return word
            case ast.Tuple(elts=parts):
                return tuple(map(self._of, parts))
            case ast.List(elts=parts):
                return [*map(self._of, parts)]
            case ast.Set(elts=parts):
                return {*map(self._of, parts)}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._of(operand)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _TO_EACH:
                return _each(_TO_EACH[type(op)], self._of(left), self._of(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                ends = [self._of(left), *map(self._of, others)]
                found = [
                    _each(_COMPARED[type(op)], a, b) for op, (a, b) in zip(ops, itertools.pairwise(ends), strict=True)
                ]
                return found[0] if len(found) == 1 else all(map(_true, found))
            case ast.BoolOp(op=ast.And(), values=parts):
                return all([_true(self._of(part)) for part in parts])
            case ast.Call(func=ast.Name(id=name), args=[one], keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](self._of(one))
            case ast.Call(func=ast.Name(id=field)) if field not in _FUNCTIONS:
                return self._selected(self._path, field, node)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(path)), attr=field)):
                return self._selected(path, field, node)
        raise FigureError(f"cannot be read: {ast.unparse(node)}")

    def _selected(self, path: str | None, field: str, call: ast.Call) -> Any:
        """The values of a field in the lines that a call selects; a number, if it is one line."""
        if path is None:
            raise FigureError(f'{field} is of no file: write it behind a link, or as "FILE".{field}(…)')
        if not (ROOT / path).exists():
            raise FigureError(f"there is no file {path}")
        wanted = self._where | {word.arg: self._of(word.value) for word in call.keywords}
        by = wanted.pop("by", None)
        lines = [json.loads(line) for line in (ROOT / path).read_text().splitlines()]
        places = {id(line): (path, number) for number, line in enumerate(lines)}
        lines = [x for x in lines if field in x and all(k in x and _is(x[k], v) for k, v in wanted.items())]
        for test in call.args:
            match test:
                case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[other]):
                    limit, compare = self._of(other), _COMPARED[type(op)]
                    lines = [line for line in lines if name in line and compare(line[name], limit)]
                case _:
                    raise FigureError(f"selects nothing: {ast.unparse(test)}")
        if not lines:
            raise FigureError(f"{path} has no line for {ast.unparse(call)}")
        values = [np.array(line[field]) if isinstance(line[field], list) else line[field] for line in lines]
        if by is None:
            keys = [places[id(line)] for line in lines]
            return values[0] if len(values) == 1 else Column(zip(keys, values, strict=True))
        names = by if isinstance(by, tuple) else (by,)
        keys = [tuple(line[name] for name in names) if len(names) > 1 else line[names[0]] for line in lines]
        if len(set(keys)) < len(keys):
            raise FigureError(f"{ast.unparse(call)} has several lines with the same {', '.join(names)}")
        return Column(zip(keys, values, strict=True))


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str) and "*" in wanted:
        return fnmatch.fnmatchcase(value, wanted)
    return value == wanted


def _true(found: Any) -> bool:
    values = _values(found)
    if not all(np.asarray(value).dtype == bool for value in values):
        raise FigureError("says nothing that holds or does not")
    return all(bool(np.all(value)) for value in values)


def results(text: str, path: str | None = None) -> Iterator[Any]:
    """What an expression is; once for each value, where its `where` names several.

    Args:
        text: the expression.
        path: the file, from the repository's root, of fields that name none; None: there is no such file.
    """
    expression, _, conditions = " ".join(text.split()).partition(" where ")
    found = _Expression(f"_({conditions})", None, {})._tree
    if not isinstance(found, ast.Call) or found.args:
        raise FigureError(f"cannot be read: where {conditions}")
    read = _Expression("0", None, {})
    where = {str(word.arg): read._of(word.value) for word in found.keywords}
    several = {name: x if isinstance(x, tuple) and name != "by" else (x,) for name, x in where.items()}
    for values in itertools.product(*several.values()):
        yield _Expression(expression, path, dict(zip(several, values, strict=True))).result()


def holds(text: str, path: str | None = None) -> bool:
    """Whether a statement is true of its files."""
    return all([_true(found) for found in results(text, path)])


def check_figure(written: str, text: str, path: str | None, *, whole: bool = False) -> None:
    """Raises FigureError unless the last numbers of a text are those of an expression, rounded as they are written.

    Args:
        written: the text.
        text: the expression.
        path: the file, from the repository's root, of fields that name none.
        whole: whether all its numbers must be.
    """
    (found,) = results(text, path)
    values = found if isinstance(found, tuple) else (found,)
    numbers = NUMBER.findall(written)
    if len(numbers) < len(values) or (whole and len(numbers) > len(values)):
        raise FigureError(f"{len(values)} numbers are computed, and the page has {written!r}")
    for number, value in zip(numbers[len(numbers) - len(values) :], values, strict=True):
        plain = number.replace(",", "").replace("−", "-")
        places = len(plain.partition(".")[2])
        if {f"{each:.{places}f}" for each in _values(value)} != {plain}:
            raise FigureError(f"{number} should be {', '.join(f'{each:.{places + 2}f}' for each in _values(value))}")


def check_page(page: str, ratios: dict[str, str], folder: str = "") -> dict[str, int]:
    """Checks all figures of a page but those of generated parts; returns how many there are of each kind.

    Args:
        page: its text.
        ratios: those of claims, by "NAME / BASE".
        folder: of the page, from the repository's root; its links are relative to it.

    Raises:
        FigureError: lists every figure that is not what its file says, or has no note.
    """
    page, wrong, counts = GENERATED.sub("", page), [], dict.fromkeys(("figure", "holds", "ratio"), 0)
    begun, before = 0, ""  # where the text of a note begins, and that text
    noted: set[int] = set()  # where the links and ratios begin that have a note
    for note in NOTE.finditer(page):
        kind, path, text = note.groups()
        before = page[begun : note.start()] or before  # of a second note, it is the same text
        link = next((x for x in LINK.finditer(page, begun, note.start()) if x.end() == note.start()), None)
        ratio = next((x for x in RATIO.finditer(page, begun, note.start()) if x.end() == note.start()), None)
        begun = note.end()
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
                check_figure(link[1], text, posixpath.normpath(posixpath.join(folder, link[2])), whole=True)
            else:
                check_figure(before, text, path)
        except FigureError as error:
            wrong.append(f"{before[-60:]!r} {text}: {error}")
    bare = [found for kind in (LINK, RATIO) for found in kind.finditer(page) if found.start() not in noted]
    wrong += [f"{found[0]} has no note that says how it is computed" for found in bare]
    if wrong:
        raise FigureError("\n".join(wrong))
    return counts
