"""RetNet: multi-scale retention, linear attention with a fixed decay per head (Sun et al. 2023, section 2)."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config.keys import above, at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import HEAD_KEYS, SublayerSpec, head_problems, times
from flash_lm.layers.attention import AttentionSublayer, Projected, join_heads, split_heads
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.decayed_core import DecayedCore, DecayedInputs
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.linear_core import LinearOptions
from flash_lm.layers.norms import normal_heads
from flash_lm.ops.activations import gated
from flash_lm.ops.positions import rotate


@section("model.retention")
class RetentionOptions:
    """Options of multi-scale retention."""

    value_expand: int = key(2, "width of the values and of the gate, as a multiple of model.model_dim", at_least(1))
    decay_base: float = key(5.0, "the state of head h decays by 1 − 2^(−base − h) per token, h from 0", above(0))


class Retention(AttentionSublayer[DecayedInputs]):
    """Multi-scale retention: (silu(x W_g) ⊙ norm(o)) W_o, o_t = q_t S_t, S_t = γ S_{t−1} + k_tᵀ v_t (eq. 5–8).

    The decay γ is fixed per head. The norm is an RMS norm per head without a gain; it replaces the denominator.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: RetentionOptions,
        linear: LinearOptions,
        convolution: ConvolutionOptions,
        *,
        rngs: nnx.Rngs,
    ):
        """H heads of keys of width D / H, and of values `value_expand` times as wide."""
        dim, values = config.model_dim, options.value_expand * config.model_dim
        self.core, self.rotary = DecayedCore(linear.chunk_size, config.kernels), bool(config.rotary)
        self.heads = self.key_heads = config.num_heads
        self.key_width, self.value_width = dim // self.heads, values // self.heads
        self.decay_base = options.decay_base
        self.projection_weights = 2 * dim * dim + 3 * dim * values
        self.query = Dense(dim, dim, config, rngs=rngs)
        self.key = Dense(dim, dim, config, rngs=rngs)
        self.value = Dense(dim, values, config, rngs=rngs)
        # Values are wider than keys, and so are the gate and the output's input.
        self.gate = Dense(dim, values, config, rngs=rngs)
        self.output = Output(values, dim, config, rngs=rngs)
        self.convolutions = short_convolutions({"query": dim, "key": dim, "value": values}, config, convolution)

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, keys, values and the gate."""
        return {name: getattr(self, name)(x_BxLxD) for name in ("query", "key", "value", "gate")}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[DecayedInputs]:
        """Heads, queries divided by √K, and the same decay for all tokens."""
        q, k, v = (split_heads(maps[name], self.heads) for name in ("query", "key", "value"))
        if self.rotary_width is not None:
            q, k = (rotate(x, context.rotary[self.rotary_width]) for x in (q, k))
        # In float32, from 1 − γ: in bfloat16 all but the first few γ would be 1.
        one_minus_gamma = 2.0 ** -(self.decay_base + np.arange(self.heads))
        log_decay_1xHx1 = jnp.asarray(np.log1p(-one_minus_gamma), jnp.float32)[None, :, None]
        return Projected(DecayedInputs(q / math.sqrt(self.key_width), k, log_decay_1xHx1), v, maps["gate"])

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: jax.Array | None) -> jax.Array:
        """Normalises each head, and gates."""
        return self.output(gated(gate_BxLxE, join_heads(normal_heads(mixed_BxHxLxE))))


def _problems(config: ModelConfig) -> list[str]:
    # Keys of width D / H, whatever model.head_dim is for the other layers of a pattern.
    return head_problems(dataclasses.replace(config, head_dim=None))


RETENTION = SublayerSpec(
    Retention,
    (RetentionOptions, LinearOptions, ConvolutionOptions),
    HEAD_KEYS | {"kernels"},
    problems=_problems,
)
ROWS = {
    "retnet": Family(
        (RETENTION, MLP_SPEC),
        # Values and gates of 2 D take 4 D² more than the Transformer's, which the MLP gives.
        {"rotary": True, "mlp_dim": times(2)},
        about="multi-scale retention: linear attention with a fixed decay per head, output gate, and an MLP",
        paper="Sun et al. 2023, arXiv:2307.08621",
    )
}
