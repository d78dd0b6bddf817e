"""Counts the bytes that a compiled program reads from and writes to the device's memory, by kind of work.

Each instruction reads its operands and writes its results once; what a fusion computes in between costs nothing. Of an
array of which a slice is read or replaced, only the slice counts. That is what the program asks for: caches may save
some of it.
"""

import collections
from typing import NamedTuple

from benchmarks.lib.hlo import Computation, Instruction, parse_program

# Operations that move nothing themselves: names of other arrays, and the end of a pair whose start counts.
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "while",
        "conditional",
        "call",
        "copy-done",
        "slice-done",
        "async-done",
        "async-update",
        "all-reduce-done",
        "all-gather-done",
        "collective-permute-done",
    ]
)
_PRODUCTS = frozenset({"dot", "convolution"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element"})
# A fusion of nothing but these moves arrays, and computes nothing.
_MOVES = (
    _SLICES
    | _VIEWS
    | frozenset(
        [
            "parameter",
            "constant",
            "tuple",
            "copy",
            "transpose",
            "dynamic-update-slice",
            "pad",
            "concatenate",
            "broadcast",
            "iota",
            "fusion",
        ]
    )
)
_SMALL = 64  # bytes: an index
_MOVING = frozenset(
    [
        "copy",
        "copy-start",
        "transpose",
        "slice",
        "slice-start",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
        "pad",
        "reshape",
    ]
)
KINDS = ("products", "elementwise", "copies", "kernels", "collectives")


class _Program(NamedTuple):
    computations: dict[str, Computation]
    unknown: int | None


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
    computations, entry = parse_program(program)
    total: collections.Counter[str] = collections.Counter(dict.fromkeys(KINDS, 0))
    for kind, size, _ in _visit(_Program(computations, unknown_trips), entry, 1):
        total[kind] += size
    return dict(total)


def largest_instructions(program: str, count: int, unknown_trips: int | None = None) -> list[tuple[str, int, str]]:
    """The instructions that move most bytes: kind, bytes in all iterations, and name."""
    computations, entry = parse_program(program)
    return sorted(_visit(_Program(computations, unknown_trips), entry, 1), key=lambda x: -x[1])[:count]


def _visit(program: _Program, name: str, times: int):
    """Yields kind, bytes and name of each instruction that moves any."""
    instructions = program.computations[name]
    for key, one in instructions.items():
        if one.operation == "while":
            trips = program.unknown if one.trips is None else one.trips
            if trips is None:
                raise ValueError(f"the number of iterations of {key} is unknown")
            for called in one.called:
                yield from _visit(program, called, times * trips)
        elif one.operation in ("conditional", "call", "async-start"):
            # Of a conditional's branches the one that moves least: the others are forms that hold for large keys.
            branches = [list(_visit(program, called, times)) for called in one.called]
            yield from min(branches, key=lambda moved: sum(size for _, size, _ in moved), default=[])
        elif one.operation not in _FREE:
            yield _kind(program, one), times * _moved(program, instructions, one), key


def _moved(program: _Program, instructions: Computation, one: Instruction) -> int:
    """Bytes of one instruction."""
    operands = [instructions.get(name) for name in one.operands]
    if one.operation == "copy-start":  # results are the copy, the original, and a number
        return sum(x.bytes for x in one.arrays[:2] if not x.on_chip)
    if one.operation == "fusion":
        return _fused(program, one, operands)
    # Only a slice of the first operand is read or replaced.
    if one.operation in _SLICES:
        operands = operands[1:]
        return 2 * _far(one) + sum(_far(x) for x in operands if x is not None and one.operation == "gather")
    if one.operation == "dynamic-update-slice":
        update = operands[1]
        return 2 * _far(update) if update is not None else 0
    results = _far(one)
    if one.operation == "custom-call" and "cublas" in one.target:
        results = max(x.bytes for x in one.arrays)  # besides the product, a workspace
    return results + sum(_far(x) for x in operands if x is not None)


def _fused(program: _Program, one: Instruction, operands: list[Instruction | None]) -> int:
    """Bytes of a fusion: of each operand what its users take, and its results."""
    inside = program.computations[one.called[0]]
    total = 0
    for name, instruction in inside.items():
        if instruction.operation == "parameter" and instruction.index is not None:
            operand = operands[instruction.index]
            if operand is not None and any(not x.on_chip for x in operand.arrays):
                total += min(_taken(program, inside, name), _far(operand))
    return total + _results(program, inside, one)


def _taken(program: _Program, inside: Computation, name: str) -> int:
    """Bytes of an array that its users in a fusion read; all of them, if any user does."""
    whole, parts = inside[name].bytes, 0
    if inside[name].is_root:  # of a nested fusion of views, whose result another instruction reads
        return whole
    for user_name, user in inside.items():
        if name not in user.operands:
            continue
        if user.operation in _VIEWS:
            parts += _taken(program, inside, user_name)
        elif user.operation in _SLICES and user.operands[0] == name:
            parts += user.bytes
        elif user.operation == "dynamic-update-slice" and user.operands[0] == name and user.operands[1] != name:
            continue  # replaced in place
        elif user.operation == "fusion":
            nested = program.computations[user.called[0]]
            at = [i for i, operand in enumerate(user.operands) if operand == name]
            names = [key for key, x in nested.items() if x.operation == "parameter" and x.index in at]
            parts += sum(_taken(program, nested, key) for key in names)
        else:
            return whole
    return min(parts, whole)


def _results(program: _Program, inside: Computation, one: Instruction) -> int:
    """Bytes that a fusion writes: of an array of which a slice is replaced, the slice."""
    root = next(x for x in inside.values() if x.is_root)
    roots = [inside[name] for name in root.operands] if root.operation == "tuple" else [root]
    total = 0
    for array, result in zip(one.arrays, roots, strict=False):
        if not array.on_chip:
            total += min(_written(program, inside, result), array.bytes)
    return total


def _written(program: _Program, inside: Computation, result: Instruction) -> int:
    if result.operation in _VIEWS and result.operands and result.operands[0] in inside:
        return _written(program, inside, inside[result.operands[0]])
    if result.operation == "dynamic-update-slice":
        return inside[result.operands[1]].bytes
    if result.operation == "fusion":
        nested = program.computations[result.called[0]]
        return _written(program, nested, next(x for x in nested.values() if x.is_root))
    return result.bytes


def _kind(program: _Program, one: Instruction) -> str:
    name = one.operation.removesuffix("-start")
    if name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        return "collectives"
    if one.operation in _PRODUCTS or "cublas" in one.target:
        return "products"
    if one.operation == "custom-call":
        return "kernels"
    if one.operation == "fusion":
        operations = set(_operations(program, one.called[0]))
        if operations & _PRODUCTS:
            return "products"
        return "copies" if operations <= _MOVES else "elementwise"
    return "copies" if one.operation in _MOVING else "elementwise"


def _operations(program: _Program, name: str):
    for one in program.computations[name].values():
        if one.bytes > _SMALL:
            yield one.operation
        for called in one.called if one.operation == "fusion" else ():
            yield from _operations(program, called)


def _far(one: Instruction) -> int:
    """Bytes of the results that are in the device's memory."""
    return sum(x.bytes for x in one.arrays if not x.on_chip)
