"""The schema of `config.mesh`: device mesh and sharding rules."""

import dataclasses

from flash_lm.config.keys import key
from flash_lm.config.regexes import MOST_REGEXES, regex_problem

MESH_AXES = ("data", "fsdp", "tensor")


def _sharding_rules(rules: tuple) -> str | None:
    if len(rules) > MOST_REGEXES:
        return f"at most {MOST_REGEXES} rules"
    for rule in rules:
        # A rule may be anything that a user writes, so its parts are checked in turn.
        why = ""
        try:
            regex, spec = rule
            if problem := regex_problem(regex):
                why = f": its regex {problem}"
            named = [axis for entry in spec for axis in axes_of(entry)]
            good = isinstance(spec, tuple) and set(named) <= set(MESH_AXES) and len(set(named)) == len(named)
        except (TypeError, ValueError):
            good = False
        if not good or why:
            axes = ", ".join(MESH_AXES)
            return (
                f"pairs of a regex and a tuple of different mesh axes ({axes}), tuples of them, or None, and "
                f"{rule!r:.80} is not{why}"
            )
    return None


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that shard a dimension; `entry`: of a rule's spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _mesh_shape(x: tuple) -> str | None:
    good = len(x) == 3 and all(isinstance(n, int) and (n > 0 or n == -1) for n in x) and x.count(-1) <= 1
    return None if good else "three sizes (data, fsdp, tensor), each positive, or one of them -1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The keys of `config.mesh`: the shape of the device mesh, and the sharding rules of parameters."""

    shape: tuple = key((-1, 1, 1), "devices along (data, fsdp, tensor); one may be -1: the rest", _mesh_shape)
    rules: tuple = key(
        (
            ("embedding", ("tensor", "fsdp")),
            ("shared/kernel", ("fsdp", None)),  # one head: splitting it would communicate scores instead of values
            ("(query|key|value|distance|gate|up|receptance|update|candidate)/kernel", ("fsdp", "tensor")),
            # XLA's TPU compiler reduces and scatters the gradient of the first, and all-reduces that of the second.
            ("(output|down)/kernel", (("tensor", "fsdp"), None)),
            ("(output|down)/kernel", ("tensor", "fsdp")),
            ("skip_map/kernel", ("tensor", None)),  # from what the rule for values cuts, to a number a head
            ("(query|key)_position", (None, "fsdp")),
        ),
        "the first rule whose regex is found in the parameter's path and whose axes divide it; the spec names the mesh "
        "axis of each dimension, or a tuple of axes, except the stacked layers' dimension; a matrix without a rule is "
        "sharded over fsdp, along its largest dimension",
        _sharding_rules,
    )
