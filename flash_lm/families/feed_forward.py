"""Specs of the feed-forwards, MLP and GLU, that close the layers of many families."""

from flash_lm.families.sublayer_spec import EVERYTHING, SublayerSpec, times
from flash_lm.layers.feed_forward import GLU, MLP

MLP_SPEC = SublayerSpec(MLP, keys=frozenset({"mlp_dim"}), defaults={"mlp_dim": times(4)}, serves=EVERYTHING)
# Two thirds of an MLP's width, so that three matrices have as many parameters as two.
GLU_SPEC = SublayerSpec(GLU, keys=frozenset({"mlp_dim"}), defaults={"mlp_dim": times(8, 3)}, serves=EVERYTHING)
