"""Counts the bytes that a compiled program reads from and writes to the device's memory, by kind of work.

Each instruction reads its operands and writes its results once; what a fusion computes in between costs nothing. Of an
array of which a slice is read or replaced, only the slice counts. That is what the program asks for: caches may save
some of it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.lib import collectives
from benchmarks.lib.hlo import Computation, Instruction, parse_program

KINDS: tuple[str, ...] = ("products", "elementwise", "copies", "kernels", "collectives")

# Other names of arrays, and the ends of asynchronous pairs, whose starts count.
_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"})
_FREE |= {"partition-id", "replica-id", "copy-done", "slice-done", "async-done", "async-update"}
_FREE |= {f"{kind}-done" for kind in collectives.KINDS}
_BRANCHES = frozenset({"conditional", "call", "async-start"})
_PRODUCTS = frozenset({"dot", "convolution"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element"})
_MOVING = _SLICES | {"copy", "transpose", "dynamic-update-slice", "pad", "concatenate", "reshape"}
# A fusion of nothing else computes nothing.
_MOVES = _MOVING | _VIEWS | {"parameter", "constant", "tuple", "fusion", "broadcast", "iota"}
_SMALL = 64  # bytes: an index


class Moved(NamedTuple):
    """What an instruction moves in all iterations of the loops around it."""

    kind: str
    bytes: int
    name: str


def count_moved_bytes(program: str, unknown_trips: int | None = None) -> dict[str, int]:
    """Bytes read and written for one run of a program, by kind.

    Args:
        program: the text of `compiled.as_text()`.
        unknown_trips: iterations of a loop whose number depends on the data; None: an error.

    Returns:
        A row of `KINDS` each: matrix products with what is fused into them; other computations; copies, transpositions
        and slices alone; custom calls that are not products; collectives.

    Raises:
        ValueError: the number of iterations of a loop is unknown.
    """
    total = dict.fromkeys(KINDS, 0)
    for moved in list_moved(program, unknown_trips):
        total[moved.kind] += moved.bytes
    return total


def list_moved(program: str, unknown_trips: int | None = None) -> list[Moved]:
    """The instructions that move anything, those that move most first; arguments are those of `count_moved_bytes`."""
    computations, entry = parse_program(program)
    return sorted(_Program(computations, unknown_trips).moved(entry, 1), key=lambda one: -one.bytes)


class _Program:
    """The computations of a program by name."""

    def __init__(self, computations: dict[str, Computation], unknown_trips: int | None):
        self._computations, self._unknown_trips = computations, unknown_trips

    def moved(self, computation: str, times: int) -> Iterator[Moved]:
        """What the instructions of a computation move that runs `times` times."""
        instructions = self._computations[computation]
        for name, one in instructions.items():
            if one.operation == "while":
                trips = self._unknown_trips if one.trips is None else one.trips
                if trips is None:
                    raise ValueError(f"the number of iterations of {name} is unknown")
                for called in one.called:
                    yield from self.moved(called, times * trips)
            elif one.operation in _BRANCHES:
                # Of a conditional, the branch that moves least: the others are forms that hold for large keys.
                branches = [list(self.moved(called, times)) for called in one.called]
                yield from min(branches, key=lambda branch: sum(x.bytes for x in branch), default=[])
            elif one.operation not in _FREE:
                yield Moved(self._kind(one), times * self._bytes(instructions, one), name)

    def _bytes(self, instructions: Computation, one: Instruction) -> int:
        """Bytes that an instruction reads and writes, once."""
        operands = [instructions.get(name) for name in one.operands]
        if one.operation == "copy-start":  # its results are the copy, the original, and a number
            return sum(x.bytes for x in one.arrays[:2] if not x.on_chip)
        if one.operation == "fusion":
            return self._fused(one, operands)
        # Only a slice of the first operand is read or replaced.
        if one.operation in _SLICES:
            return 2 * _far(one) + (sum(map(_far, operands[1:])) if one.operation == "gather" else 0)
        if one.operation == "dynamic-update-slice":
            return 2 * _far(operands[1])
        if one.operation == "scatter":
            return 3 * _far(operands[-1]) + sum(map(_far, operands[1:-1]))
        # The result of a product by cuBLAS comes with a workspace, which does not count.
        written = one.arrays[0].bytes if "cublas" in one.target else _far(one)
        return written + sum(map(_far, operands))

    def _fused(self, one: Instruction, operands: list[Instruction | None]) -> int:
        """Of each operand of a fusion what its users take, and the results."""
        inside = self._computations[one.called[0]]
        read = 0
        for name, instruction in inside.items():
            if instruction.operation == "parameter" and instruction.index is not None:
                read += min(self._taken(inside, name), _far(operands[instruction.index]))
        root = next(x for x in inside.values() if x.is_root)
        results = [inside[name] for name in root.operands] if root.operation == "tuple" else [root]
        if len(results) != len(one.arrays):  # several reductions at once
            return read + _far(one)
        pairs = zip(one.arrays, results, strict=True)
        return read + sum(min(self._written(inside, x), array.bytes) for array, x in pairs if not array.on_chip)

    def _taken(self, inside: Computation, name: str) -> int:
        """Bytes of an array that its users in a fusion read; all of them, if any user does or it is the result."""
        whole, parts = inside[name].bytes, 0
        if inside[name].is_root:
            return whole
        for user_name, user in inside.items():
            if name not in user.operands:
                continue
            if user.operation in _VIEWS:
                parts += self._taken(inside, user_name)
            elif user.operation in _SLICES and user.operands[0] == name:
                parts += user.bytes
            elif user.operation == "fusion":
                nested, at = self._computations[user.called[0]], user.operands.index(name)
                parameters = (key for key, x in nested.items() if x.operation == "parameter" and x.index == at)
                parts += sum(self._taken(nested, key) for key in parameters)
            elif user.operation != "dynamic-update-slice" or user.operands[0] != name:  # that replaces a part in place
                return whole
        return min(parts, whole)

    def _written(self, inside: Computation, result: Instruction) -> int:
        """Bytes of a result that are written; of an array of which a slice is replaced, the slice."""
        if result.operation in _VIEWS:
            return self._written(inside, inside[result.operands[0]])
        if result.operation == "dynamic-update-slice":
            return inside[result.operands[1]].bytes
        if result.operation == "fusion":
            nested = self._computations[result.called[0]]
            return self._written(nested, next(x for x in nested.values() if x.is_root))
        return result.bytes

    def _kind(self, one: Instruction) -> str:
        if one.operation.removesuffix("-start") in collectives.KINDS:
            return "collectives"
        if one.operation in _PRODUCTS or "cublas" in one.target:
            return "products"
        if one.operation == "custom-call":
            return "kernels"
        if one.operation == "fusion":
            operations = set(self._operations(one.called[0]))
            return "products" if operations & _PRODUCTS else "copies" if operations <= _MOVES else "elementwise"
        return "copies" if one.operation.removesuffix("-start") in _MOVING else "elementwise"

    def _operations(self, computation: str) -> Iterator[str]:
        """The operations of a fusion, without those that compute an index."""
        for one in self._computations[computation].values():
            if one.bytes > _SMALL:
                yield one.operation
            for called in one.called if one.operation == "fusion" else ():
                yield from self._operations(called)


def _far(one: Instruction | None) -> int:
    """Bytes of an instruction's results that are in the device's memory."""
    return sum(x.bytes for x in one.arrays if not x.on_chip) if one else 0
