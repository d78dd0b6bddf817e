"""A file with a line per cell of a benchmark, complete after every turn, so that a killed run keeps what it has."""

import os
import pathlib

from flash_lm.runs.jsonl import Line, write_jsonl


class CellLines:
    """The lines of a benchmark by cell, and their file; a new run replaces the file of an older one.

    Cells take turns, so a cell's line is written when it is compiled, and again after each of its turns. What its other
    turns add, such as a median of more of them, replaces the earlier figures.
    """

    def __init__(self, file: pathlib.Path, *keys: str):
        """Removes the file of an older run. `keys`: keys of a line that identify its cell."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        self._file, self._keys = file, keys
        self._lines: dict[tuple, Line] = {}

    @property
    def lines(self) -> list[Line]:
        """The lines so far, in the order in which their cells came."""
        return list(self._lines.values())

    def put(self, *lines: Line) -> None:
        """Adds the lines of cells, or replaces the lines that these cells have, in the file, too."""
        self._lines |= {tuple(line[key] for key in self._keys): line for line in lines}
        partial = self._file.with_suffix(".partial")
        write_jsonl(partial, self.lines)
        os.replace(partial, self._file)
