"""Counts the collective operations of a compiled program, and their bytes, including those in loops."""

import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_TYPE = re.compile(r"\b([a-z]+)(\d+)?(?:e\w+)?\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"(?:to_apply|body|condition|calls|(?:branch|called)_computations|(?:true|false)_computation)="
    r"\{?((?:%[\w.\-]+(?:, )?)+)"
)


class Traffic(NamedTuple):
    """The traffic of one kind of collective, for one run of the program on one device.

    Attributes:
        count: number of operations.
        bytes: size of the operands or of the result, whichever is larger.
    """

    count: int
    bytes: int


class _Instruction(NamedTuple):
    operation: str
    bytes: int  # of the result
    operands: list[str]
    called: list[str]
    trips: int | None  # of a while loop


def count_collectives(program: str) -> dict[str, Traffic]:
    """Sums the collectives of an HLO program; for a conditional, those of all branches.

    Args:
        program: the text of `compiled.as_text()`.

    Returns:
        The traffic of each kind that occurs.

    Raises:
        ValueError: a collective is in a loop whose number of iterations is unknown.
    """
    computations, entry = _parse(program)
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


def _parse(program: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Returns the instructions of each computation, by name, and the name of the entry computation."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", ""
    for line in program.splitlines():
        stripped = line.strip()
        if line.endswith("{") and "->" in line:
            current = _NAME.search(line).group(1)  # type: ignore[union-attr]
            entry = current if line.startswith("ENTRY") else entry
            computations[current] = {}
        elif current and " = " in stripped:
            left, right = stripped.split(" = ", 1)
            name = _NAME.search(left)
            if name:
                computations[current][name.group(1)] = _instruction(right)
    return computations, entry


def _instruction(text: str) -> _Instruction:
    """Parses `type operation(operands), attributes`; the type of a tuple is in parentheses, too."""
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    operation, _, rest = rest.partition("(")
    close = _closing("(" + rest) - 1
    called = [name for group in _CALLED.findall(rest[close:]) for name in _NAME.findall(group)]
    trips = _TRIPS.search(rest)
    return _Instruction(
        operation, _bytes(kind), _NAME.findall(rest[:close]), called, int(trips.group(1)) if trips else None
    )


def _closing(text: str) -> int:
    """Returns the position of the parenthesis that closes the first one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return i
    return len(text)


def _bytes(kind: str) -> int:
    """Returns the bytes of an HLO type, such as f32[8,4] or a tuple of types."""
    total = 0
    for letters, bits, sizes in _TYPE.findall(kind):
        count = 1
        for size in sizes.split(","):
            count *= int(size or 1)
        total += count * (int(bits) // 8 if bits else 1 if letters == "pred" else 0)
    return total
