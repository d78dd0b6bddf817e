"""Keys and values of older versions, and what they are now: old runs still load, and an old flag's error says it."""

from collections.abc import Mapping
from typing import Any

MOVED = {
    "model.expanded_dim": ("model.gau.expanded_dim",),
    "model.shared_dim": ("model.gau.shared_dim",),
    "model.gau_heads": ("model.gau.heads",),
    "model.query_key": ("model.gau.query_key",),
    "model.relative_bias": ("model.gau.relative_bias",),
    "model.attention_function": ("model.gau.attention_function",),
    "model.chunk_size": ("model.chunks.size", "model.linear.chunk_size"),
    "model.local_attention": ("model.chunks.local_attention",),
    "model.overlapping_chunks": ("model.chunks.overlapping",),
    "model.global_attention": ("model.chunks.global_attention",),
    "model.window_size": ("model.aft.window",),
    "model.bias_dim": ("model.aft.bias_dim",),
    "model.bias_rate": ("model.aft.bias_rate",),
    "model.num_features": ("model.favor.features",),
    "model.redraw_features": ("model.favor.redraw",),
    "model.mixtures": ("model.logistics.mixtures",),
    "data.mask_rate": ("data.masking.rate",),
    "model.attention_implementation": ("model.quadratic.implementation",),
}

# By key, the values that have another name now. What tells a run from others still has the former name.
VALUES = {"model.normalizer": {"paper": "length_everywhere"}}


def move(values: dict[str, Any]) -> dict[str, Any]:
    """Moves the keys of older versions to where they are now, and renames values; a nested dict of plain values."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for before, places in MOVED.items():
        *parents, last = before.split(".")
        level = values
        for parent in parents:
            level = level.get(parent, {})
        if last not in level:
            continue
        value = level.pop(last)
        for place in places:
            *parents, last = place.split(".")
            level = values
            for parent in parents:
                level = level.setdefault(parent, {})
            level.setdefault(last, value)
    for name, renamed in VALUES.items():
        group, _, last = name.partition(".")
        if isinstance(level := values.get(group), dict) and last in level:
            level[last] = renamed.get(level[last], level[last])
    return values


def former(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A config by full names, with the values as the first versions spelled them."""
    first = {name: {now: before for before, now in renamed.items()} for name, renamed in VALUES.items()}
    spelled = {name: first[name].get(flat[name], flat[name]) for name in first.keys() & flat.keys()}
    return {**flat, **spelled}


def places(name: str) -> tuple[str, ...]:
    """The current name or names of a key of any version."""
    return MOVED.get(name, (name,))
