"""Table of the families under test, from the files in `families`; a family without an entry fails its tests."""

import importlib
import pkgutil
from types import SimpleNamespace

import families

from oracles import counting
from oracles.feed_forward import GLU, MLP
from oracles.row import Family, Sublayer

FAMILIES: dict[str, Family] = {}
for _module in pkgutil.iter_modules(families.__path__):
    FAMILIES |= importlib.import_module(f"families.{_module.name}").ROWS


_FEED_FORWARDS = {"mlp": MLP, "glu": GLU}


def sublayers(s: SimpleNamespace) -> tuple[Sublayer, ...]:
    """The sublayers of a layer of the settings' family, with the feed-forward of the settings."""
    of_family = FAMILIES[s.family].sublayers
    return tuple(_FEED_FORWARDS[s.feed_forward] if x in _FEED_FORWARDS.values() else x for x in of_family)


def complete(model: dict) -> SimpleNamespace:
    """Fills in the open keys of `config.model` with the family's defaults; sections become namespaces.

    The normalizer N is the count of visible keys for causal models in which it divides the weights, and the length
    otherwise. `layers` holds the settings of each layer of a pattern; all share the model's `norm` and
    `absolute_positions`.
    """
    s = SimpleNamespace(**{k: SimpleNamespace(**v) if isinstance(v, dict) else v for k, v in model.items()})
    family = FAMILIES[s.family]
    glu = lambda s: counting.multiple_of_8(8, 3, s.model_dim)
    defaults = {
        "feed_forward": next((name for name, x in _FEED_FORWARDS.items() if x in family.sublayers), None),
        "divides": "scores",
        "normalizer": lambda s: "count" if s.causal and s.divides == "weights" else str(s.max_length),
        "residual_init": "depth",
        "mlp_dim": lambda s: glu(s) if s.feed_forward == "glu" else 4 * s.model_dim,
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
        target = getattr(s, section[0]) if section else s
        if getattr(target, name) is None:
            setattr(target, name, value(s) if callable(value) else value)
    shared = {key: getattr(s, key) for key in ("norm", "absolute_positions")}
    s.layers = [complete(model | shared | {"family": name, "pattern": ()}) for name in s.pattern] or [s]
    return s
