"""Specs of the feed-forwards, MLP and GLU, that close the layers of many families."""

from collections.abc import Iterable

from flash_lm.config.model import ModelConfig
from flash_lm.families.sublayer_spec import EVERYTHING, Default, SublayerSpec, times
from flash_lm.layers.feed_forward import GLU, MLP
from flash_lm.layers.sublayer import Sublayer

_KEYS = frozenset({"feed_forward", "mlp_dim"})


def _spec(name: str, build: type[Sublayer], width: Default) -> SublayerSpec:
    return SublayerSpec(build, keys=_KEYS, defaults={"feed_forward": name, "mlp_dim": width}, serves=EVERYTHING)


MLP_SPEC = _spec("mlp", MLP, times(4))
# Two thirds of an MLP's width, so that three matrices have as many parameters as two.
GLU_SPEC = _spec("glu", GLU, times(8, 3))
FEED_FORWARDS = {"mlp": MLP_SPEC, "glu": GLU_SPEC}  # by model.feed_forward


def choose_feed_forward(specs: Iterable[SublayerSpec], layer: ModelConfig) -> tuple[SublayerSpec, ...]:
    """The specs of a layer's sublayers, with the feed-forward of `model.feed_forward` in the place of the family's."""
    chosen = FEED_FORWARDS.get(layer.feed_forward)  # None: open
    return tuple(chosen if chosen and spec in FEED_FORWARDS.values() else spec for spec in specs)
