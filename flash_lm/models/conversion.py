"""Conversion of a model's parameters to another family, such as a Transformer's to MC-TFM's, with a report.

Parameters are matched by the layer of the model, the sublayer of that layer, and the name within it. So the two models
may stack their layers differently: one by one, or by the repetitions of different patterns.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FAMILIES
from flash_lm.errors import InputError
from flash_lm.families.family import layer_configs
from flash_lm.layers.attention import AttentionSublayer
from flash_lm.layers.parameter import is_stacked, parameter_name
from flash_lm.models.block import Block

Names = dict[str, tuple[int, ...]]  # names of parameters, with the layers of the model; none: outside of the layers


class Report(NamedTuple):
    """Where the parameters of a converted model come from, by their names (`parameter_name`).

    A target's parameter is taken, widened or new: in some of its layers the one, in others the other, if the layers of
    a pattern differ.

    Attributes:
        taken: those that are the source's.
        widened: the source's keys and values, with each head repeated for all heads of queries that share it.
        restacked: those among the taken and widened whose layers are stacked in another order than in the source.
        new: those that the source has no counterpart of, with their initial values.
        left_out: the source's parameters that the target has no counterpart of, by the source's names and layers.
    """

    taken: Names
    widened: Names
    restacked: Names
    new: Names
    left_out: Names


class Conversion(NamedTuple):
    """The parameters of a converted model, nested dicts of arrays on the host, and where they come from."""

    params: dict[str, Any]
    report: Report


class _Place(NamedTuple):
    """Where a parameter is in a model, however its layers are stacked.

    layer: of the model, from 0; −1: outside of the layers.
    part: the number of a sublayer in that layer, or norm_ and that number; empty: outside of the layers.
    name: within that part, such as query/kernel.
    """

    layer: int
    part: str
    name: str


class _Value(NamedTuple):
    """The value of a parameter in one layer, its place and name in the model, and its sublayer, if it is of one."""

    x: np.ndarray
    place: _Place
    name: str
    sublayer: Any


def convert(params: Any, source: ModelConfig, target: ModelConfig, fresh: Any) -> Conversion:
    """The parameters of a model of `target` that come from those of a model of `source`.

    Args:
        params: parameters of the source, nested dicts of arrays.
        source: its complete config.
        target: the complete config of the new model.
        fresh: initial parameters of the new model, for those that the source has no counterpart of.

    Raises:
        InputError: the configs differ in a key that they must share, or parameters have shapes that no rule explains;
            one line for each.
    """
    if problems := _key_problems(source, target):
        raise InputError.of(problems)
    known, restacks = _by_place(params, source), len(layer_configs(source)) != len(layer_configs(target))
    report, rows, used, problems = Report({}, {}, {}, {}, {}), {}, set(), {}

    # Each layer of each new parameter: from the first place of the source that exists, by the first rule that fits.
    for place, like in _by_place(fresh, target).items():
        origins = (place, place._replace(name=_origin(place.name)))
        value = next((known[origin] for origin in origins if origin in known), None)
        if value is None:
            kind, row = "new", like.x
        elif (fitted := _fit(value, like)) is None:
            problems[like.name] = _shape_problem(value, like)
            continue
        else:
            kind, row = fitted
            used.add(value.place)
            if restacks and place.part:
                _add(report.restacked, like.name, place)
        rows.setdefault(like.name, []).append(row.astype(like.x.dtype))
        _add(getattr(report, kind), like.name, place)
    if problems:
        raise InputError.of(problems.values())

    # What is left of the source; and the new parameters, stacked as the target's.
    for place, value in known.items():
        if place not in used:
            _add(report.left_out, value.name, place)
    stacked = lambda path, name: np.stack(rows[name]) if is_stacked(path) else rows[name][0]
    return Conversion(
        jax.tree_util.tree_map_with_path(lambda path, _: stacked(path, parameter_name(path)), fresh), report
    )


# Keys that both models must share, and those of layers that both read.
_MODEL_KEYS = (
    "vocab_size",
    "model_dim",
    "num_layers",
    "tie_embeddings",
    "norm",
    "norm_epsilon",
    "absolute_positions",
)
_LAYER_KEYS = ("num_heads", "head_dim", "feed_forward", "rotary_base")


def _key_problems(source: ModelConfig, target: ModelConfig) -> list[str]:
    """Sentences on keys in which the two models must be equal, and are not."""
    if source.encoder or target.encoder:
        return ["a model with an encoder cannot be converted: leave model.encoder.family open"]
    values = {f"model.{key}": (source.get(key), target.get(key)) for key in _MODEL_KEYS}
    # Where the layers of a pattern differ, each layer is compared with that of the same number.
    theirs, ours = layer_configs(source), layer_configs(target)
    for number in range(min(source.num_layers, target.num_layers)):
        a, b = theirs[number % len(theirs)], ours[number % len(ours)]
        reads = FAMILIES[a.family].reads() & FAMILIES[b.family].reads()
        of_layer = {f"model.{key}": (_value(a, key), _value(b, key)) for key in _LAYER_KEYS if f"model.{key}" in reads}
        values |= {key: pair for key, pair in of_layer.items() if pair[0] != pair[1]}
    return [
        f"{key}={there} in the source, and {here} in the target: both must have the same, so leave it as it is there"
        for key, (there, here) in values.items()
        if there != here
    ]


def _value(layer: ModelConfig, key: str) -> Any:
    """The value of a key of a layer, without those that have no effect or another form."""
    if key == "rotary_base" and not layer.rotary:
        return None
    return layer.head_width if key == "head_dim" else layer.get(key)


def _by_place(params: Any, config: ModelConfig) -> dict[_Place, _Value]:
    """The parameters of a model by their places; those of layers one by one."""
    block = nnx.eval_shape(lambda: Block(layer_configs(config), rngs=nnx.Rngs(0)))
    values = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, x = parameter_name(path), np.asarray(leaf)
        if not is_stacked(path):
            place = _Place(-1, "", name)
            values[place] = _Value(x, place, name, None)
            continue
        # A name such as layers/sublayer_2/query/kernel, or layers/norm_sublayer_2/scale.
        _, part, within = name.split("/", 2)
        number = block.names.index(part.removeprefix("norm_"))
        layer, index = block.layer_and_index(number)
        is_norm = part.startswith("norm_")
        for i, row in enumerate(x):
            place = _Place(i * len(block.ends) + layer, f"{'norm_' * is_norm}{index}", within)
            values[place] = _Value(row, place, name, None if is_norm else block.sublayers[number])
    return values


# Parameters that start from others where the source has none of their own: global attention of Longformer.
_ORIGINS = {
    "global_query": "query",
    "global_key": "key",
    "global_value": "value",
    "global_query_norm": "query_norm",
    "global_key_norm": "key_norm",
}
_SHARED = {"key", "value", "global_key", "global_value"}  # maps to heads that several heads of queries may share


def _origin(name: str) -> str:
    """The name of the parameter that one starts from; its own, for most."""
    return "/".join(_ORIGINS.get(part, part) for part in name.split("/"))


def _fit(value: _Value, like: _Value) -> tuple[str, np.ndarray] | None:
    """The name of the first rule that turns a value into one of another's shape, and the result; None: none does."""
    results = ((kind, rule(value, like)) for kind, rule in _RULES.items())
    return next(((kind, x) for kind, x in results if x is not None and x.shape == like.x.shape), None)


def _shape_problem(value: _Value, like: _Value) -> str:
    heads = _key_heads(value, like)
    there, here = (
        f"{list(one.x.shape)}" + (f" of {count} heads" if heads[0] != heads[1] else "")
        for one, count in zip((value, like), heads, strict=True)
    )
    of_one = " of a layer" if value.place.part else ""
    return (
        f"{like.name}{of_one} is {there} in the source, and {here} in the target: no rule explains it, so set the "
        "target's keys for equal widths"
    )


def _key_heads(value: _Value, like: _Value) -> tuple[int, int]:
    """The heads of keys and values in both, where the parameter is of a map to these; else 1 and 1."""
    both = (value.sublayer, like.sublayer)
    if not _SHARED & {*like.name.split("/")} or not all(isinstance(x, AttentionSublayer) for x in both):
        return 1, 1
    return value.sublayer.key_heads, like.sublayer.key_heads


def _take(value: _Value, like: _Value) -> np.ndarray | None:
    """The value itself, unless it is of other heads."""
    heads, wanted = _key_heads(value, like)
    return value.x if heads == wanted else None


def _repeat_heads(value: _Value, like: _Value) -> np.ndarray | None:
    """Each head of keys or values, G in all, once for each of the heads that shared it, so that there are H.

    Head h of the queries reads head h // (H / G) of the keys, so copies of a head follow each other.
    """
    heads, wanted = _key_heads(value, like)
    if wanted % heads or value.x.shape[-1] % heads:
        return None
    of_heads = value.x.reshape(*value.x.shape[:-1], heads, -1)  # kernels, biases and filters end with the heads
    return of_heads.repeat(wanted // heads, axis=-2).reshape(*value.x.shape[:-1], -1)


# What the report calls it -> the rule.
_RULES: Mapping[str, Callable[[_Value, _Value], np.ndarray | None]] = {"taken": _take, "widened": _repeat_heads}


def _add(names: Names, name: str, place: _Place) -> None:
    names[name] = (*names.get(name, ()), *([place.layer] if place.part else []))
