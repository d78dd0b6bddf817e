"""Scale-offsets x ⊙ γ + β that turn Z into queries and keys (FLASH, eq. 3), and the initial γ."""

from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.layers.dense import KERNEL_INITS
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.scale_offset import scale_offset


class ScaleOffsets(nnx.Module):
    """n scale-offsets x ⊙ γ_i + β_i, with γ and β per dimension (FLASH, eq. 3: Q and K from one Z).

    With parameters for H heads, an array with one head becomes one with H heads.
    """

    def __init__(self, scale: jax.Array):
        """γ, n×K or n×H×K, is the initial scale; β starts at 0."""
        self.scale = nnx.Param(scale, **VECTORS)
        self.offset = nnx.Param(jnp.zeros_like(scale), **VECTORS)

    def __call__(self, x_BxHxLxK: jax.Array | Sequence[jax.Array]) -> list[jax.Array]:
        """Makes n arrays B×H×L×K from one or n arrays; parameters are (K) or (H, K)."""
        # One source for all variants, or a source for each.
        copies = self.scale.shape[0]
        xs = [x_BxHxLxK] * copies if isinstance(x_BxHxLxK, jax.Array) else x_BxHxLxK
        heads = 1 if self.scale.ndim == 2 else self.scale.shape[1]
        scale, offset = (p[...].reshape(copies, heads, -1) for p in (self.scale, self.offset))
        return [scale_offset(x, scale[i], offset[i]) for i, x in enumerate(xs)]


def unit_scales(
    scaled: Mapping[str, bool], width: tuple[int, ...], config: ModelConfig, zero: Collection[str] = ()
) -> jax.Array:
    """γ of one array of each pair: 1, or K^-1/4 for scores that are not divided by √K; 0 for the pairs `zero`.

    Otherwise the linear part of mixed chunks would start many times larger than the quadratic one, and dominate it.
    """
    usual = {name: 1.0 if is_scaled else width[-1] ** -0.25 for name, is_scaled in scaled.items()}
    starts = [0.0 if name in zero else start for name, start in usual.items()]
    return jnp.stack([jnp.full(width, start, config.param_dtype) for start in starts])


# What γ of the queries and keys of a gated attention unit starts with, in turn, by the names of model.init
_SCALES = {
    "normal": lambda key, scaled, width, config: KERNEL_INITS["normal"](
        key, (2 * len(scaled), *width), jnp.dtype(config.param_dtype)
    ),
    "lecun": lambda key, scaled, width, config: jnp.repeat(unit_scales(scaled, width, config), 2, axis=0),
}


def first_scales(
    scaled: Mapping[str, bool], width: tuple[int, ...], config: ModelConfig, *, of_one_source: bool, rngs: nnx.Rngs
) -> jax.Array:
    """γ that the queries and keys of a gated attention unit start with, in turn, 2n×K or 2n×H×K for n pairs.

    Args:
        scaled: the core's pairs, and whether their scores are divided by √K.
        width: (K,) or (H, K).
        config: of the layer.
        of_one_source: whether queries and keys are scale-offsets of the same Z. With equal γ each token would then see
            tokens like itself most, and masked tokens each other, which keeps a masked language model from its context
            for long (studies/defaults/README.md). So they start as `model.scale_init` says.
        rngs: for the random starts.
    """
    init = "normal" if of_one_source and config.scale_init == "normal" else config.init
    return _SCALES[init](rngs.params(), scaled, width, config)
