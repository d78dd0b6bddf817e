"""Arrays of another library's model from and to our parameters: names, layouts, and stacked layers."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flash_lm.errors import InputError
from flash_lm.models.formats.format import Arrays, Format, Layout

_LAYERS, _TABLE, _HEAD = "layers.", "embedding", "output_embedding"
_LISTED = 5  # names or shapes that an error lists
Shape = tuple[int, ...]


class _Place(NamedTuple):
    """An array of theirs, for the layer `layer` of ours, or None: it is of no layer."""

    theirs: str
    ours: tuple[str, ...]
    layer: int | None
    layout: Layout


def to_params(row: Format, arrays: Arrays, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Converts another library's arrays to our nested parameters.

    Args:
        row: the format.
        arrays: functions that read them, by name.
        shapes: those of our parameters, by names with dots.

    Raises:
        InputError: arrays are missing, unknown, or of another shape.
    """
    # The names must be exactly those of our model's parameters.
    arrays = row.prepare({name: read for name, read in arrays.items() if not name.endswith(row.ignored)})
    places, absent = _places(row, shapes)
    expected = {place.theirs for place in places}
    # A tied head may be in the file, too, as a copy of the embedding.
    heads = {place.theirs for place in absent if place.ours == (_HEAD,)} & arrays.keys()
    present = arrays.keys() - heads
    if wrong := [*(f"no {x}" for x in sorted(expected - present)), *(f"also {x}" for x in sorted(present - expected))]:
        raise InputError(f"the weights are not those of {row.title} with this config.json: {_listed(wrong)}")

    for table, head in ((place.theirs, head) for place in places if place.ours == (_TABLE,) for head in heads):
        if not np.array_equal(arrays[table](), arrays[head]()):
            raise InputError(f"config.json says that {head} is {table}, and the two differ: it is damaged")

    # Read one by one, cut into our parameters, and stack the layers.
    flat, wrong, layers = {}, [], {}
    for place in places:
        x, parts = arrays[place.theirs](), [shapes[name][place.layer is not None :] for name in place.ours]
        like = place.layout.write(np.broadcast_to(np.float32(0), _joined(parts))).shape
        if x.shape != like:
            wrong.append(f"{place.theirs} is {list(x.shape)}, not {list(like)}")
            continue
        for name, part in zip(place.ours, _cut(place.layout.read(x), parts), strict=True):
            if place.layer is None:
                flat[name] = part
            else:
                layers.setdefault(name, []).append(part)
    if wrong:
        raise InputError(f"the weights do not fit config.json: {_listed(wrong)}")
    return unflatten_dict(flat | {name: np.stack(parts) for name, parts in layers.items()}, sep=".")


def from_params(row: Format, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts our parameters on the host to another library's arrays by name.

    Raises:
        InputError: the format has no place for a parameter.
    """
    flat: dict[str, np.ndarray] = flatten_dict(dict(params), sep=".")  # pyright: ignore[reportAssignmentType]
    places, _ = _places(row, {name: x.shape for name, x in flat.items()})
    if lost := flat.keys() - {name for place in places for name in place.ours}:
        raise InputError(f"{row.title} has no place for {_listed(sorted(lost))}")
    arrays = {}
    for theirs, ours, layer, layout in places:
        parts = [flat[name] if layer is None else flat[name][layer] for name in ours]
        arrays[theirs] = layout.write(np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0])
    return arrays


def _places(row: Format, shapes: Mapping[str, Shape]) -> tuple[list[_Place], list[_Place]]:
    """The arrays of a model with these parameters, in the order of the layers; and those that it must not have."""
    found, absent = [], []
    for tensor in row.tensors:
        for unit in range(row.units):
            ours = tuple(name.format(unit=unit) for name in tensor.ours)
            there = [name in shapes for name in ours]
            to = found if all(there) else absent
            if any(there) and not all(there):
                raise InputError(f"{row.title} joins {', '.join(ours)}, and the model has only some of them")
            if "{i}" not in tensor.theirs:
                to.append(_Place(tensor.theirs, ours, None, tensor.layout))
                break
            to += [_Place(name, ours, layer, tensor.layout) for layer, name in _names(row, tensor.theirs, unit, shapes)]
    return found, absent


def _names(row: Format, theirs: str, unit: int, shapes: Mapping[str, Shape]) -> Iterator[tuple[int, str]]:
    count = next(shape[0] for name, shape in shapes.items() if name.startswith(_LAYERS))
    for layer in range(count):
        yield layer, re.sub(r"\{i\}", str(layer * row.units + unit), theirs)


def _joined(parts: list[Shape]) -> Shape:
    """The shape of arrays that are joined along the last dimension."""
    return parts[0] if len(parts) == 1 else (*parts[0][:-1], sum(shape[-1] for shape in parts))


def _cut(x: np.ndarray, parts: list[Shape]) -> list[np.ndarray]:
    """Cuts along the last dimension into arrays of these shapes."""
    return [x] if len(parts) == 1 else np.split(x, np.cumsum([shape[-1] for shape in parts])[:-1], axis=-1)


def _listed(problems: list[str]) -> str:
    more = f", and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return f"{', '.join(problems[:_LISTED])}{more}"
