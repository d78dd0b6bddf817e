"""Counts the collective operations of a compiled program, and their bytes, including those in loops."""

from typing import NamedTuple

from benchmarks.lib.hlo import parse_program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


class Traffic(NamedTuple):
    """The traffic of one kind of collective, for one run of the program on one device.

    Attributes:
        count: number of operations.
        bytes: size of the operands or of the result, whichever is larger.
    """

    count: int
    bytes: int


def count_collectives(program: str) -> dict[str, Traffic]:
    """Sums the collectives of an HLO program; for a conditional, those of all branches.

    Args:
        program: the text of `compiled.as_text()`.

    Returns:
        The traffic of each kind that occurs.

    Raises:
        ValueError: a collective is in a loop whose number of iterations is unknown.
    """
    computations, entry = parse_program(program)
    traffic: dict[str, Traffic] = {}

    def visit(name: str, times: int | None) -> None:
        instructions = computations[name]
        for one in instructions.values():
            # The second operation of an asynchronous pair has the result; the first has buffers of both ends.
            kind = one.operation.removesuffix("-done")
            if kind in KINDS:
                if times is None:
                    raise ValueError(f"an {kind} is in a loop whose number of iterations is unknown")
                operands = [instructions[x] for x in one.operands if x in instructions]
                sent = [x.bytes for x in operands if not x.operation.endswith("-start")]
                size = max(one.bytes, sum(sent))
                count, total = traffic.get(kind, (0, 0))
                traffic[kind] = Traffic(count + times, total + times * size)
            for called in one.called if kind not in KINDS else ():
                turns = one.trips if one.operation == "while" else 1
                visit(called, None if turns is None or times is None else times * turns)

    visit(entry, 1)
    return traffic
