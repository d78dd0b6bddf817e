"""Gated linear attention (GLA): data-dependent decay per channel (Yang et al. 2023, sections 3 and 4)."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import above, at_least, below, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import GLU_SPEC
from flash_lm.families.sublayer_spec import (
    NORMED_HEAD_KEYS,
    NORMED_HEADS,
    SublayerSpec,
    fraction_per_head,
    one_way_problems,
    uneven_head_problems,
    width_problems,
)
from flash_lm.layers.attention import AttentionSublayer, Projected, norm_and_gate, split_heads
from flash_lm.layers.attention_core import PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions, short_convolutions
from flash_lm.layers.decayed_core import from_either_end
from flash_lm.layers.dense import NEVER, Dense, Output
from flash_lm.layers.kernel_packages import compute_by_package
from flash_lm.layers.linear_core import LinearOptions, sums_flops
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.vector_decay import GatedInputs, gated_sums, longest_chunk, prefill_gated, step_gated


@section("model.gla")
class GLAOptions:
    """Options of gated linear attention."""

    key_dim: int = key(None, "width of the queries and keys of all heads; open: D / 2", at_least(1))
    gate_rank: int = key(16, "rank of the map to the decays", at_least(1))
    gate_normalizer: float = key(16.0, "a channel decays by σ(·)^(1 / this) per token", above(0))
    gate_floor: float = key(-5.0, "lowest logarithm of a decay; a chunk has at most 80 / |this| tokens", below(0))


class GatedCore(PlainCore):
    """Linear attention with vector decay: S_t = diag(α_t) S_{t−1} + k_tᵀ v_t, o_t = q_t S_t (see `ops.vector_decay`).

    Bidirectional: every second head reads the sequence from its end.
    """

    def __init__(self, chunk_size: int, kernels: str):
        """A core without parameters; `kernels` is `model.kernels`."""
        self.chunk_size, self.kernels = chunk_size, kernels

    def __call__(self, by: GatedInputs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""

        def mix(by: GatedInputs, v: jax.Array, runs_BxL: jax.Array) -> jax.Array:
            out = compute_by_package(self.kernels, "gated_sums", tuple(by), v, runs_BxL)
            return gated_sums(by, v, runs_BxL, chunk_size=self.chunk_size) if out is None else out

        return from_either_end(mix, by, v, context)

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """The state S before the first token, zeros, B×H×K×E float32; `capacity` is not used."""
        return jnp.zeros((batch, heads, key_width, value_width), jnp.float32)

    def prefill(self, by: GatedInputs, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chunkwise form from any position: the state needs no chunk grid."""
        return prefill_gated(by, v, state, context.real(), chunk_size=self.chunk_size)

    def step(self, by: GatedInputs, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Recurrent form: one product with the state."""
        out, after = step_gated(by, v, state)
        return out, jnp.where(context.real()[:, :, None, None], after, state)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Pairs inside the chunk, and two products with the state."""
        return sums_flops(length, True, self.chunk_size, heads, key_width, value_width)


class GatedLinearAttention(AttentionSublayer[GatedInputs]):
    """GLA: (norm(o) ⊙ silu(x W_g)) W_o with o_t = q_t S_t, S_t = diag(α_t) S_{t−1} + k_tᵀ v_t per head (eq. 3, 4).

    α = σ(x W_1 W_2 + b)^(1/τ), and at least e^floor, so that chunks can be computed as products.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: GLAOptions,
        linear: LinearOptions,
        convolution: ConvolutionOptions,
        *,
        rngs: nnx.Rngs,
    ):
        """H heads."""
        dim, keys, rank = config.model_dim, options.key_dim, options.gate_rank
        chunk_size = min(linear.chunk_size, longest_chunk(options.gate_floor))
        self.core, self.rotary = GatedCore(chunk_size, config.kernels), False
        self.heads = self.key_heads = config.num_heads
        self.key_width, self.value_width = keys // self.heads, dim // self.heads
        self.normalizer, self.floor = options.gate_normalizer, options.gate_floor
        gates = dim if config.output_gate == "silu" else 0
        self.projection_weights = dim * (2 * keys + 2 * dim + gates) + rank * (dim + keys)
        self.query = Dense(dim, keys, config, rngs=rngs)
        self.key = Dense(dim, keys, config, rngs=rngs)
        self.value = Dense(dim, dim, config, rngs=rngs)
        self.gate = Dense(dim, gates, config, rngs=rngs) if gates else None
        # The decay has a low-rank projection, as in the paper.
        self.decay_down = Dense(dim, rank, config, rngs=rngs, biased=NEVER)
        self.decay_up = Dense(rank, keys, config, rngs=rngs, biased=NEVER)
        self.output = Output(dim, dim, config, rngs=rngs)
        self.convolutions = short_convolutions({"query": keys, "key": keys, "value": dim}, config, convolution)
        # A bias of the decay, and the gain of the norm before the gate, with model.head_norm.
        self.decay_bias = nnx.Param(jnp.zeros(keys, jnp.dtype(config.param_dtype)), **VECTORS)
        gain = jnp.ones(self.value_width, jnp.dtype(config.param_dtype))
        self.gain = nnx.Param(gain, **VECTORS) if config.head_norm else None

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Linear maps for queries, keys, values, decay and, with model.output_gate, the gate."""
        names = ("query", "key", "value") + (("gate",) if self.gate else ())
        maps = {name: getattr(self, name)(x_BxLxD) for name in names}
        return maps | {"decay": self.decay_up(self.decay_down(x_BxLxD))}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[GatedInputs]:
        """Heads, queries divided by √K, and the decay of each channel."""
        q, k, v = (split_heads(maps[name], self.heads) for name in ("query", "key", "value"))
        # Log decay per channel: log σ(x) / τ, not below the floor, so that products over a chunk stay finite.
        bias = self.decay_bias[...].astype(jnp.float32)[None, None]
        log_decay = jax.nn.log_sigmoid(maps["decay"].astype(jnp.float32) + bias) / self.normalizer
        log_decay_BxHxLxK = split_heads(jnp.maximum(log_decay, self.floor), self.heads)
        return Projected(GatedInputs(q / math.sqrt(self.key_width), k, log_decay_BxHxLxK), v, maps.get("gate"))

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: Any) -> jax.Array:
        """Normalises each head, with one gain for all, and gates."""
        return self.output(norm_and_gate(mixed_BxHxLxE, self.gain, gate_BxLxE))


def _problems(config: ModelConfig) -> list[str]:
    widths = {"model.gla.key_dim": config[GLAOptions].key_dim}
    return width_problems(config) + uneven_head_problems(widths, config) + one_way_problems(config)


GLA = SublayerSpec(
    GatedLinearAttention,
    (GLAOptions, LinearOptions, ConvolutionOptions),
    NORMED_HEAD_KEYS | {"num_heads", "kernels"},
    defaults={"gla.key_dim": fraction_per_head(1, 2), **NORMED_HEADS},
    problems=_problems,
)
ROWS = {
    "gla": Family(
        (GLA, GLU_SPEC),
        about="gated linear attention: data-dependent decay per channel, output gate, and a GLU",
        paper="Yang et al. 2023, arXiv:2312.06635",
    )
}
