"""The text of a compiled program as instructions."""

import math
import re
from typing import NamedTuple

_TYPE = re.compile(r"\b([a-z]+)(\d+)?(?:e\w+)?\[([\d,]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_PARAMETER = re.compile(r"^\d+$")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
# Devices that exchange data, as lists, as a shape [number of groups,devices of a group], or as axes of a mesh.
_GROUP_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUP_SHAPE = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_GROUP_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+)|=(\d+))?")
_CALLED = re.compile(
    r"(?:to_apply|body|condition|calls|(?:branch|called)_computations|(?:true|false)_computation)="
    r"\{?((?:%[\w.\-]+(?:, )?)+)"
)


class Array(NamedTuple):
    """An array of an instruction's result.

    bytes: size of its elements.
    on_chip: in the chip's own memory (a TPU's VMEM), not in the main one.
    """

    bytes: int
    on_chip: bool


class Instruction(NamedTuple):
    """An instruction.

    operation: opcode, such as fusion.
    arrays: results, one for each array of a tuple.
    operands: names.
    called: names of the computations that it calls.
    trips: number of iterations of a while loop; None: unknown, or not a loop.
    target: of a custom call.
    index: of a parameter or of an element of a tuple, or a constant's value, if whole; None: another instruction.
    is_root: whether its result is that of its computation.
    channel: number of a collective, the same for the parts into which a compiler cuts it; None: another instruction.
    group: number of devices that exchange data in a collective; None: all, or another instruction.
    """

    operation: str
    arrays: tuple[Array, ...]
    operands: list[str]
    called: list[str]
    trips: int | None
    target: str
    index: int | None
    is_root: bool
    channel: int | None = None
    group: int | None = None

    @property
    def bytes(self) -> int:
        """Of all results."""
        return sum(x.bytes for x in self.arrays)


Computation = dict[str, Instruction]


def parse_program(text: str) -> tuple[dict[str, Computation], str]:
    """The instructions of each computation, by name, and the name of the entry computation.

    Args:
        text: `compiled.as_text()`.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", ""
    for line in text.splitlines():
        stripped = line.strip()
        if line.endswith("{") and "->" in line:
            current = _NAME.search(line).group(1)  # type: ignore[union-attr]
            entry = current if line.startswith("ENTRY") else entry
            computations[current] = {}
        elif current and " = " in stripped:
            left, right = stripped.split(" = ", 1)
            name = _NAME.search(left)
            if name:
                computations[current][name.group(1)] = _instruction(right, left.startswith("ROOT"))
    for instructions in computations.values():
        for name, one in instructions.items():
            if one.operation == "while" and one.trips is None:
                conditions = (computations[x] for x in one.called)
                instructions[name] = one._replace(trips=next(filter(None, map(_trips, conditions)), None))
    return computations, entry


def _trips(condition: Computation) -> int | None:
    """The constant that a loop counts to, in a program of a TPU, where only the condition says it; None: another one.

    JAX's loops of known length count from 0 in steps of 1.
    """
    root = next(x for x in condition.values() if x.is_root)
    operands = [condition[x] for x in root.operands if x in condition]
    counts = root.operation == "compare" and [x.operation for x in operands] == ["get-tuple-element", "constant"]
    return operands[1].index if counts else None


def _instruction(text: str, is_root: bool) -> Instruction:
    """Parses `type operation(operands), attributes`; the type of a tuple is in parentheses, too."""
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    operation, _, rest = rest.partition("(")
    close = _closing("(" + rest) - 1
    inside, attributes = rest[:close], rest[close:]
    called = [name for group in _CALLED.findall(attributes) for name in _NAME.findall(group)]
    trips, target = _TRIPS.search(attributes), _TARGET.search(attributes)
    index = re.search(r"index=(\d+)", attributes) if operation == "get-tuple-element" else _PARAMETER.match(inside)
    return Instruction(
        operation,
        _arrays(kind),
        _NAME.findall(inside),
        called,
        int(trips.group(1)) if trips else None,
        target.group(1) if target else "",
        int(index.group().removeprefix("index=")) if index else None,
        is_root,
        int(found.group(1)) if (found := _CHANNEL.search(attributes)) else None,
        _group_size(attributes),
    )


def _group_size(attributes: str) -> int | None:
    """Number of devices in a group of `replica_groups`; None: the attribute is missing or has no groups."""
    if found := _GROUP_LIST.search(attributes):
        return found.group(1).count(",") + 1
    if found := _GROUP_SHAPE.search(attributes):
        return int(found.group(1))
    if found := _GROUP_MESH.search(attributes):
        # A part of an axis has its own size, as in 'x':(2)4.
        sizes = {name: int(size) for name, _, size in _AXIS.findall(found.group(1))}
        return math.prod(int(part or sizes[name]) for name, part, _ in _AXIS.findall(found.group(2)))
    return None


def _closing(text: str) -> int:
    """Returns the position of the parenthesis that closes the first one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return i
    return len(text)


def _arrays(kind: str) -> tuple[Array, ...]:
    """The arrays of an HLO type, such as f32[8,4]{1,0} or a tuple of types."""
    arrays = []
    for letters, bits, sizes, layout in _TYPE.findall(kind):
        count = 1
        for size in sizes.split(","):
            count *= int(size or 1)
        space = _MEMORY_SPACE.search(layout)
        width = int(bits) // 8 if bits else 1 if letters == "pred" else 0
        arrays.append(Array(count * width, space is not None and space.group(1) != "0"))
    return tuple(arrays)
