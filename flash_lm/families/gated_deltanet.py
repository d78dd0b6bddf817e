"""Gated DeltaNet: the gated delta rule ("Gated Delta Networks", Yang et al. 2024); without decay DeltaNet."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import GLU_SPEC
from flash_lm.families.sublayer_spec import (
    NORMED_HEAD_KEYS,
    NORMED_HEADS,
    SublayerSpec,
    fraction_per_head,
    one_way_problems,
    times,
    uneven_head_problems,
)
from flash_lm.layers.attention import AttentionSublayer, Projected, norm_and_gate, split_heads
from flash_lm.layers.attention_core import PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import short_convolutions
from flash_lm.layers.decayed_core import first_rates, first_steps, from_either_end
from flash_lm.layers.dense import NEVER, Dense, Output
from flash_lm.layers.kernel_packages import compute_by_package
from flash_lm.layers.linear_core import chunk_work
from flash_lm.layers.parameter import VECTORS
from flash_lm.ops.activations import silu
from flash_lm.ops.delta_rule import DeltaInputs, delta_rule, prefill_delta, step_delta

_EPSILON = 1e-6  # added to ‖x‖² under the root when queries and keys are normalised


@section("model.delta")
class DeltaOptions:
    """Options of the gated delta rule."""

    chunk_size: int = key(64, "tokens processed at a time", at_least(1))
    key_dim: int = key(None, "width of the queries and keys of all heads; open: 3 D / 4", at_least(1))
    value_dim: int = key(None, "width of the values and of the gate; open: 3 D / 2", at_least(1))
    decay: bool = key(True, "data-dependent decay of the state; False: DeltaNet")
    negative_eigenvalues: bool = key(
        False, "whether β reaches 2, so that the state transition may have negative eigenvalues (allow_neg_eigval)"
    )


class DeltaCore(PlainCore):
    """Gated delta rule: S̃ = e^{g_t} S_{t−1}, S_t = S̃ + k_tᵀ β_t (v_t − k_t S̃), o_t = q_t S_t (see `ops.delta_rule`).

    Bidirectional: every second head reads the sequence from its end.
    """

    def __init__(self, chunk_size: int, kernels: str):
        """A core without parameters; `kernels` is `model.kernels`."""
        self.chunk_size, self.kernels = chunk_size, kernels

    def __call__(self, by: DeltaInputs, v: jax.Array, context: Context) -> jax.Array:
        """Chunkwise form over full sequences, for training: outputs B×H×L×E."""

        def mix(by: DeltaInputs, v: jax.Array, runs_BxL: jax.Array) -> jax.Array:
            out = compute_by_package(self.kernels, "delta_rule", tuple(by), v, runs_BxL)
            return delta_rule(by, v, runs_BxL, chunk_size=self.chunk_size) if out is None else out

        return from_either_end(mix, by, v, context)

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """The state S before the first token, zeros, B×H×K×E float32; `capacity` is not used."""
        return jnp.zeros((batch, heads, key_width, value_width), jnp.float32)

    def prefill(self, by: DeltaInputs, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chunkwise form; a prefill may start at any position, since the state is exact after every token."""
        return prefill_delta(by, v, state, context.real(), chunk_size=self.chunk_size)

    def step(self, by: DeltaInputs, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Recurrent form: two products with the state."""
        out, after = step_delta(by, v, state)
        return out, jnp.where(context.real()[:, :, None, None], after, state)

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Forward FLOPs: pairs within a chunk, the triangular system (UT transform), and products with the state."""
        pairs, products = chunk_work(length, self.chunk_size)
        reading = max(length - self.chunk_size, 0)  # tokens after the first chunk multiply the state twice: k S and q S
        of_system = (pairs - length) * (2 * key_width + value_width)
        of_pairs = pairs * (key_width + value_width) + of_system
        return 2 * heads * (of_pairs + (products + reading) * key_width * value_width) / length


class GatedDeltaAttention(AttentionSublayer[DeltaInputs]):
    """Gated delta rule per head, output norm and gate: (norm(o) ⊙ silu(x W_g)) W_o.

    Queries, keys and values are maps of x with short convolutions and silu; keys are L2-normalised per
    head, and so are queries, times 1/√K.
    β = σ(x W_b), and the state decays by e^(−a softplus(x W_a + b)) per token, with a and b per head.
    """

    def __init__(self, config: ModelConfig, options: DeltaOptions, *, rngs: nnx.Rngs):
        """Builds projections, short convolutions, decay parameters and the output norm, for H heads."""
        dim, keys, values = config.model_dim, options.key_dim, options.value_dim
        self.core, self.rotary = DeltaCore(options.chunk_size, config.kernels), False
        self.heads = self.key_heads = config.num_heads
        self.key_width, self.value_width = keys // self.heads, values // self.heads
        self.largest_beta = 2 if options.negative_eigenvalues else 1
        gates = values if config.output_gate == "silu" else 0
        self.projection_weights = dim * (2 * keys + 2 * values + gates + (2 if options.decay else 1) * self.heads)
        self.query = Dense(dim, keys, config, rngs=rngs)
        self.key = Dense(dim, keys, config, rngs=rngs)
        self.value = Dense(dim, values, config, rngs=rngs)
        self.gate = Dense(dim, gates, config, rngs=rngs) if gates else None
        self.beta = Dense(dim, self.heads, config, rngs=rngs)
        self.output = Output(values, dim, config, rngs=rngs)
        # Short convolutions on queries, keys and values, as published.
        self.convolutions = short_convolutions({"query": keys, "key": keys, "value": values}, config)
        vector = lambda x: nnx.Param(x.astype(jnp.dtype(config.param_dtype)), **VECTORS)
        self.gain = vector(jnp.ones(self.value_width)) if config.head_norm else None
        # The decay is parametrised as in Mamba-2, with log_rate as its A_log and step_bias as its dt_bias.
        self.step_size = Dense(dim, self.heads, config, rngs=rngs, biased=NEVER) if options.decay else None
        if options.decay:
            self.log_rate = vector(first_rates(self.heads, rngs))
            self.step_bias = vector(first_steps(self.heads, rngs))

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Linear maps for queries, keys, values and β; for the gate and the decay, if it has these."""
        names = ("query", "key", "value", "beta")
        names += tuple(name for name in ("gate", "step_size") if getattr(self, name) is not None)
        return {name: getattr(self, name)(x_BxLxD) for name in names}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[DeltaInputs]:
        """Splits heads, normalises queries and keys, and computes β and the log-decay."""
        # Heads; silu follows the short convolutions.
        q, k, v = (split_heads(silu(maps[name]), self.heads) for name in ("query", "key", "value"))
        # β, the write strength, and the log-decay g; g = 0 without decay (DeltaNet).
        beta_BxHxL = self.largest_beta * jax.nn.sigmoid(_move_heads(maps["beta"]))
        log_decay_BxHxL = jnp.zeros_like(beta_BxHxL)
        if self.step_size is not None:
            rate, bias = (x[...].astype(jnp.float32)[None, :, None] for x in (self.log_rate, self.step_bias))
            log_decay_BxHxL = -jnp.exp(rate) * jax.nn.softplus(_move_heads(maps["step_size"]) + bias)
        # Unit keys keep the eigenvalues of the state's update within 1.
        by = DeltaInputs(_unit(q, 1 / math.sqrt(self.key_width)), _unit(k), log_decay_BxHxL, beta_BxHxL)
        return Projected(by, v, maps.get("gate"))

    def finish(self, mixed_BxHxLxE: jax.Array, gate_BxLxE: Any) -> jax.Array:
        """Normalises each head, with one gain for all, and gates."""
        return self.output(norm_and_gate(mixed_BxHxLxE, self.gain, gate_BxLxE))


def _move_heads(x_BxLxH: jax.Array) -> jax.Array:
    return jnp.swapaxes(x_BxLxH.astype(jnp.float32), 1, 2)


@jax.checkpoint  # keeps its input
def _unit(x_BxHxLxK: jax.Array, length: float = 1.0) -> jax.Array:
    """Normalised vectors x · length / ‖x‖; dtype of x."""
    x = x_BxHxLxK.astype(jnp.float32)
    return (length * x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + _EPSILON)).astype(x_BxHxLxK.dtype)


def _problems(config: ModelConfig) -> list[str]:
    delta = config[DeltaOptions]
    widths = {"model.delta.key_dim": delta.key_dim, "model.delta.value_dim": delta.value_dim}
    return uneven_head_problems(widths, config) + one_way_problems(config)


DELTA = SublayerSpec(
    GatedDeltaAttention,
    (DeltaOptions,),
    NORMED_HEAD_KEYS | {"num_heads", "kernels"},
    defaults={
        **NORMED_HEADS,
        "delta.key_dim": fraction_per_head(3, 4),
        "delta.value_dim": fraction_per_head(3, 2),
        "short_convolution": 4,
    },
    problems=_problems,
)
ROWS = {
    "gated_deltanet": Family(
        (DELTA, GLU_SPEC),
        {"mlp_dim": times(2)},  # 6 D² and a GLU of 6 D², instead of 4 D² and 8 D²
        about="gated delta rule (data-dependent decay, error-correcting writes), and a GLU",
        paper="Yang et al. 2024, arXiv:2412.06464",
    )
}
