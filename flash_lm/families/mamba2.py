"""Mamba-2: structured state space duality (SSD, Dao and Gu 2024); bidirectional: Hydra (Hwang et al. 2024)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.sublayer_spec import SublayerSpec, times
from flash_lm.layers.attention import AttentionSublayer, Projected, join_heads, split_heads
from flash_lm.layers.attention_core import UndecodableCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import short_convolutions
from flash_lm.layers.decayed_core import DecayedCore, DecayedInputs, first_rates, first_steps
from flash_lm.layers.dense import NEVER, Dense, Output
from flash_lm.layers.linear_core import chunk_work
from flash_lm.layers.norms import RMSNorm
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.scalar_decay import decayed_sums


@section("model.ssd")
class SSDOptions:
    """Options of Mamba-2 (SSD) blocks."""

    expanded_dim: int = key(None, "width of the values and of the gate; open: 2 D", at_least(1))
    chunk_size: int = key(64, "tokens processed at a time", at_least(1))
    head_width: int = key(None, "P, width of a head's values; open: 64, or E if that is less", at_least(1))
    state_dim: int = key(64, "N, width of the queries and keys, which all heads share", at_least(1))


class Ungated(NamedTuple):
    """What the output of the core is added to and gated with.

    value_BxLxE: x.
    skip_BxLxH: d, a factor of x per head, (B or 1)×(L or 1)×H float32.
    gate_BxLxE: the gate before its silu.
    """

    value_BxLxE: jax.Array
    skip_BxLxH: jax.Array
    gate_BxLxE: jax.Array


class TwoWayCore(UndecodableCore):
    """Hydra: the sum of a forward and a backward SSD, each shifted by one token (Hwang et al. 2024, eq. 9).

    Neither includes the token itself.
    """

    def __init__(self, chunk_size: int):
        """A core without parameters, whose heads share the queries and keys of a direction."""
        self.chunk_size = chunk_size

    def __call__(self, by: tuple[DecayedInputs, DecayedInputs], v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E; `by`: inputs of the forward and of the backward SSD."""
        assert context.segments is not None
        before, after = by
        runs_BxL = context.segments.runs_BxL
        # The backward SSD is the forward one on the reversed sequence.
        turned, v_turned = jax.tree.map(lambda x: jnp.flip(x, axis=2), (after, v))
        of_after = self._shifted_causal(turned, v_turned, jnp.flip(runs_BxL, axis=1))
        return self._shifted_causal(before, v, runs_BxL) + jnp.flip(of_after, axis=2)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """A causal sequence, twice."""
        pairs, products = chunk_work(length, self.chunk_size)
        per_pair = key_width + heads * value_width
        return 4 * (pairs * per_pair + products * heads * key_width * value_width) / length

    def _shifted_causal(self, by: DecayedInputs, v: jax.Array, runs_BxL: jax.Array) -> jax.Array:
        """The causal output shifted by one token inside each document."""
        q, k, log_decay, _ = by
        read = decayed_sums(q, k, by.values(v), log_decay, runs_BxL, chunk_size=self.chunk_size)
        same_BxL = jnp.pad(runs_BxL[:, 1:] == runs_BxL[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(same_BxL[:, None, :, None], jnp.roll(read, 1, axis=2), 0)


class StateSpaceUnit(AttentionSublayer[Any]):
    """Mamba-2 block: norm((y + d ⊙ x) ⊙ silu(x₀ W_z)) W_o with y_t = C_t S_t, S_t = e^(−aΔ_t) S_{t−1} + B_tᵀ (Δ_t x_t).

    x, B and C are maps of the input x₀ with short convolutions and silu; Δ = softplus(x₀ W_Δ + b) and a are per head.
    Bidirectional: B, C and Δ per direction, and d + x W_d instead of d (Hydra).
    """

    def __init__(self, config: ModelConfig, options: SSDOptions, *, rngs: nnx.Rngs):
        """E / P heads."""
        dim, width, self.states = config.model_dim, options.expanded_dim, options.state_dim
        ways = 1 if config.causal else 2
        size = options.chunk_size
        self.core = DecayedCore(size, config.kernels, shared_keys=True) if config.causal else TwoWayCore(size)
        self.rotary, self.key_width, self.value_width = False, options.state_dim, options.head_width
        self.heads = self.key_heads = width // options.head_width
        # B and C of each direction, shared by all heads.
        shared = 2 * ways * self.states
        to_skip = 0 if config.causal else width * self.heads
        self.projection_weights = dim * (3 * width + shared + ways * self.heads) + to_skip
        self.gate = Dense(dim, width, config, rngs=rngs)
        self.value = Dense(dim, width, config, rngs=rngs)
        self.shared = Dense(dim, shared, config, rngs=rngs)
        # Δ and the skip have biases of their own, step_bias and skip.
        self.step_size = Dense(dim, ways * self.heads, config, rngs=rngs, biased=NEVER)
        self.skip_map = None if config.causal else Dense(width, self.heads, config, rngs=rngs, biased=NEVER)
        self.output = Output(width, dim, config, rngs=rngs)
        self.convolutions = short_convolutions({"value": width, "shared": shared}, config)
        self.norm = RMSNorm(config, width)

        vector = lambda values: nnx.Param(values.astype(jnp.dtype(config.param_dtype)), **VECTORS)
        # Biases of the convolutions, skip d, rate A and bias of Δ.
        self.value_bias, self.shared_bias = vector(jnp.zeros(width)), vector(jnp.zeros(shared))
        self.skip = vector(jnp.ones(self.heads))
        self.log_rate, self.step_bias = vector(first_rates(self.heads, rngs)), vector(first_steps(self.heads, rngs))

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Linear maps for z, x, B and C, and Δ."""
        return {name: getattr(self, name)(x_BxLxD) for name in ("gate", "value", "shared", "step_size")}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected:
        """One head of queries C and keys B for all heads of values."""
        value, shared = (
            _silu_of_sum(maps[name], bias[...])
            for name, bias in (("value", self.value_bias), ("shared", self.shared_bias))
        )
        # The skip connection d ⊙ x, with a d per head.
        skip_BxLxH = self.skip[...].astype(jnp.float32)[None, None]
        if self.skip_map is not None:
            skip_BxLxH = skip_BxLxH + self.skip_map(value).astype(jnp.float32)
        step_size = maps["step_size"]
        # The directions of a head are adjacent, so a mesh that cuts the heads moves nothing.
        step_size_BxLxHxW = step_size.reshape(*step_size.shape[:2], self.heads, -1)
        directions = jnp.split(shared, step_size_BxLxHxW.shape[-1], axis=-1)
        by = tuple(self._direction(x, step_size_BxLxHxW[..., way]) for way, x in enumerate(directions))
        ungated = Ungated(value, skip_BxLxH, maps["gate"])
        return Projected(by[0] if len(by) == 1 else by, split_heads(value, self.heads), ungated)

    def finish(self, mixed_BxHxLxE: jax.Array, ungated: Ungated) -> jax.Array:
        """Skip connection, gate, then norm."""
        return self.output(self.norm(_gated_sum(join_heads(mixed_BxHxLxE), *ungated)))

    def _direction(self, shared_BxLx2N: jax.Array, step_size_BxLxH: jax.Array) -> DecayedInputs:
        # Discretisation: decay e^(−aΔ), and values times Δ.
        b, c = (x[:, None] for x in jnp.split(shared_BxLx2N, 2, axis=-1))
        bias = self.step_bias[...].astype(jnp.float32)[None, None]
        steps_BxHxL = jnp.swapaxes(jax.nn.softplus(step_size_BxLxH.astype(jnp.float32) + bias), 1, 2)
        rate = jnp.exp(self.log_rate[...].astype(jnp.float32))[None, :, None]
        return DecayedInputs(c, b, -rate * steps_BxHxL, steps_BxHxL)


# Both keep their inputs, and not the intermediate results, which are cheaper to recompute than to keep.
@jax.checkpoint
def _silu_of_sum(x_BxLxE: jax.Array, bias_E: jax.Array) -> jax.Array:
    return jax.nn.silu(x_BxLxE + bias_E.astype(x_BxLxE.dtype)[None, None])


@jax.checkpoint
def _gated_sum(mixed_BxLxE: jax.Array, value_BxLxE: jax.Array, skip_BxLxH: jax.Array, gate_BxLxE: jax.Array):
    """(y + d ⊙ x) ⊙ silu(z), computed in float32; dtype of y."""
    mixed, value, gate = (x.astype(jnp.float32) for x in (mixed_BxLxE, value_BxLxE, gate_BxLxE))
    skip_BxLxE = jnp.repeat(skip_BxLxH, value.shape[-1] // skip_BxLxH.shape[-1], axis=-1)
    return ((mixed + value * skip_BxLxE) * jax.nn.silu(gate)).astype(mixed_BxLxE.dtype)


def _problems(config: ModelConfig) -> list[str]:
    width, head = config[SSDOptions].expanded_dim, config[SSDOptions].head_width
    return [f"model.ssd.expanded_dim={width} must be a multiple of model.ssd.head_width={head}"] if width % head else []


SSD = SublayerSpec(
    StateSpaceUnit,
    (SSDOptions,),
    frozenset({"kernels"}),
    defaults={
        "ssd.expanded_dim": times(2),
        "ssd.head_width": lambda config: min(64, config[SSDOptions].expanded_dim),
        "short_convolution": lambda config: 4 if config.causal else 7,
    },
    problems=_problems,
)
ROWS = {
    "mamba2": Family(
        (SSD, SSD),
        about="two Mamba-2 (SSD) blocks: scalar data-dependent decay, short convolutions, output gate",
        paper="Dao and Gu 2024, arXiv:2405.21060",
    )
}
