"""Counts the collective operations of a compiled program, and their bytes, including those in loops."""

from typing import NamedTuple

from benchmarks.lib.hlo import Computation, Instruction, parse_program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# A TPU's compiler calls a reduce-scatter so: a fusion of an all-reduce and a slice, which is never done in two steps.
_FUSED_SCATTER = "all-reduce-scatter"


class Traffic(NamedTuple):
    """The traffic of one kind of collective, for one run of the program on one device.

    Attributes:
        count: number of operations.
        bytes: size of the operands or of the result, whichever is larger.
        sent: bytes that a device sends, if the devices of a group form a ring: of n devices (n − 1) / n of `bytes`, and
            twice as many in an all-reduce, which is a reduce-scatter and an all-gather.
    """

    count: int
    bytes: int
    sent: int


def count_collectives(program: str, devices: int | None = None) -> dict[str, Traffic]:
    """Sums the collectives of an HLO program; for a conditional, those of all branches.

    Args:
        program: the text of `compiled.as_text()`.
        devices: of the program, for collectives that name none.

    Returns:
        The traffic of each kind that occurs.

    Raises:
        ValueError: a collective is in a loop whose number of iterations is unknown, or its devices are.
    """
    computations, entry = parse_program(program)
    traffic: dict[str, Traffic] = {}
    seen: set[int] = set()

    def visit(name: str, times: int | None, is_fused: bool = False) -> None:
        instructions = computations[name]
        for one in instructions.values():
            kind = one.operation.removesuffix("-start")
            # A TPU's asynchronous collective is in several fusions, which do parts of it.
            if is_fused and one.channel is not None:
                if one.channel in seen:
                    continue
                seen.add(one.channel)
            if kind in KINDS:
                if times is None:
                    raise ValueError(f"an {kind} is in a loop whose number of iterations is unknown")
                kind = "reduce-scatter" if name.startswith(_FUSED_SCATTER) else kind
                size = _size(one, instructions)
                added = times, times * size, times * _sent(kind, size, one.group or devices)
                traffic[kind] = Traffic(*(a + b for a, b in zip(traffic.get(kind, (0, 0, 0)), added, strict=True)))
            for called in one.called if kind not in KINDS else ():
                turns = one.trips if one.operation == "while" else 1
                turns = None if turns is None or times is None else times * turns
                visit(called, turns, is_fused=one.operation == "fusion")

    visit(entry, 1)
    return traffic


def _size(one: Instruction, instructions: Computation) -> int:
    """Bytes of operands or result."""
    operands = sum(instructions[x].bytes for x in one.operands if x in instructions)
    # The first of an asynchronous pair may have both in its result; that of a permutation has counters, too.
    if one.operation == "collective-permute-start":
        return operands
    return max(operands, one.bytes - operands if one.operation.endswith("-start") else one.bytes)


def _sent(kind: str, size: int, group: int | None) -> int:
    """Bytes that a device sends, see `Traffic`; `group`: number of devices."""
    if kind == "collective-permute":
        return size
    if group is None:
        raise ValueError(f"an {kind} does not say which devices exchange data")
    return size * (group - 1) // group * (2 if kind == "all-reduce" else 1)
