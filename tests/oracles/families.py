"""The families as the tests know them, from the files of `families`; one that has no row there fails its tests."""

import importlib
import pkgutil
from types import SimpleNamespace

import families

from oracles import counting
from oracles.feed_forward import GLU
from oracles.row import Family

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(families.__path__):
    FAMILIES |= importlib.import_module(f"families.{_module.name}").ROWS


def complete(model: dict) -> SimpleNamespace:
    """The settings of `config.model`, its sections as namespaces, with every open key that its family reads filled in.

    N counts for causal models whose weights it divides, and is the length for others. `layers` has the settings of
    each layer of a pattern: its own, but for what the whole model shares.
    """
    s = SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in model.items()})
    family = FAMILIES[s.family]
    defaults = {
        "divides": "scores",
        "normalizer": lambda s: "count" if s.causal and s.divides == "weights" else str(s.max_length),
        "residual_init": "depth",
        "mlp_dim": counting.multiple_of_8(8, 3, s.model_dim) if GLU in family.sublayers else 4 * s.model_dim,
        "short_convolution": 0,
        "norm": "layer",
        "absolute_positions": family.absolute,
        "head": "softmax",
        "rotary": family.rotary,
        "num_kv_heads": s.num_heads,
        "state_dtype": s.dtype,
    }
    for key, value in (defaults | family.defaults).items():
        *section, name = key.split(".")
        place = getattr(s, section[0]) if section else s
        if getattr(place, name) is None:
            setattr(place, name, value(s) if callable(value) else value)
    shared = {key: getattr(s, key) for key in ("norm", "absolute_positions")}
    s.layers = [complete(model | shared | {"family": name, "pattern": ()}) for name in s.pattern] or [s]
    return s
