"""Mega: gated attention behind an exponential moving average (EMA), with a gated residual (Ma et al. 2022)."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import GATED_UNIT_KEYS, SublayerSpec, divisor_problems, times
from flash_lm.layers.attention import (
    AttentionSublayer,
    Projected,
    join_heads,
    named_pairs,
)
from flash_lm.layers.attention_core import Pairs
from flash_lm.layers.context import Context
from flash_lm.layers.dense import NEVER, Dense
from flash_lm.layers.mixed_chunk_core import ChunkOptions, MixedChunkCore
from flash_lm.layers.norms import NORMS
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.positions import relative_bias
from flash_lm.layers.scale_offsets import ScaleOffsets, first_scales
from flash_lm.ops.activations import gated, silu
from flash_lm.ops.dropout import drop
from flash_lm.ops.moving_average import Average, moving_average, prefill_moving_average

_CHUNK = 16  # tokens of a chunk of the average
_LARGEST = 1 - 2**-24  # of 1 − q: what float32 distinguishes from forgetting all, whose logarithm is −∞


@section("model.mega")
class MegaOptions:
    """Options of Mega."""

    expanded_dim: int = key(None, "E, width of the values; open: 2 D", at_least(1))
    shared_dim: int = key(
        None, "S, width of the queries and keys; open: D / 4, rounded down to an even number", at_least(1)
    )
    ema_dim: int = key(16, "N, dimensions of the moving average per channel", at_least(1))
    relative_bias: str = key("rope", "none, t5, toeplitz or rope", one_of("none", "t5", "toeplitz", "rope"))
    attention_function: str = key("softmax", "relu2, softmax or laplace", one_of("relu2", "softmax", "laplace"))


class MovingAverage(nnx.Module):
    """Damped EMA: silu(Σ_n γ_n h_n / √N + ω ⊙ x) with h_n ← (1 − σ(δ_n) σ(α_n)) h_n + σ(δ_n) β_n x (eq. 6 and 7).

    Bidirectional: a second average with separate parameters reads the document from its end.
    """

    def __init__(self, config: ModelConfig, options: MegaOptions, name: str, *, rngs: nnx.Rngs):
        """Initialised as in the authors' code; `name`: of the array that is averaged."""
        dim, self.name, self.sums = config.model_dim, name, options.ema_dim
        self.ways = 1 if config.causal else 2
        shape, dtype = (self.ways, dim, self.sums), jnp.dtype(config.param_dtype)

        def draw(deviation: float, mean: jax.Array | float = 0.0) -> nnx.Param:
            return nnx.Param((mean + deviation * jax.random.normal(rngs.params(), shape)).astype(dtype), **VECTORS)

        # Signs alternate over the averages, so that they do not all start alike.
        signs_N = 1.0 - 2 * (jnp.arange(self.sums, dtype=jnp.float32) % 2)
        self.damping, self.decay, self.out = draw(0.2), draw(0.2), draw(1.0)
        self.into = draw(0.02, signs_N[None, None])
        self.own = nnx.Param(jax.random.normal(rngs.params(), (dim,)).astype(dtype), **VECTORS)

    def __call__(self, arrays: Mapping[str, jax.Array], context: Context) -> dict[str, jax.Array]:
        """The arrays, one of them averaged inside documents."""
        assert context.segments is not None
        x, runs_BxL = arrays[self.name], context.segments.runs_BxL
        averaged = moving_average(x, self._average(0), runs_BxL, chunk_size=_CHUNK)
        if self.ways == 2:
            # Bidirectional: the second average runs over the reversed sequence.
            x, runs_BxL = jnp.flip(x, axis=1), jnp.flip(runs_BxL, axis=1)
            after = moving_average(x, self._average(1), runs_BxL, chunk_size=_CHUNK)
            averaged = averaged + jnp.flip(after, axis=1)
        return {**arrays, self.name: self._add_residual(arrays[self.name], averaged)}

    def init_state(self, batch: int) -> jax.Array:
        """The sums before the first token, B×D×N float32."""
        return jnp.zeros((batch, *self.damping.shape[-2:]), jnp.float32)

    def prefill(
        self, arrays: Mapping[str, jax.Array], context: Context, state: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """`__call__` from any position of each sequence; and the state afterwards."""
        x = arrays[self.name]
        averaged, state = prefill_moving_average(x, self._average(0), state, context.real(), chunk_size=_CHUNK)
        return {**arrays, self.name: self._add_residual(x, averaged)}, state

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Writing to and reading from N dimensions per channel."""
        return 4.0 * self.ways * self.own.shape[-1] * self.sums

    def _average(self, way: int) -> Average:
        damping, decay, into, out = (
            x[...][way].astype(jnp.float32) for x in (self.damping, self.decay, self.into, self.out)
        )
        # Damped EMA: h keeps 1 − σ(δ) σ(α) and takes σ(δ) β x.
        share = jax.nn.sigmoid(damping)
        forgotten = jnp.minimum(share * jax.nn.sigmoid(decay), _LARGEST)
        return Average(jnp.log1p(-forgotten), share * into, out / jnp.sqrt(jnp.float32(self.sums)))

    def _add_residual(self, x_BxLxD: jax.Array, average_BxLxD: jax.Array) -> jax.Array:
        return _residual_silu(x_BxLxD, average_BxLxD, self.own[...])


class GatedResidual(NamedTuple):
    """Inputs of the gated residual besides the attention output.

    stream: the residual stream, B×L×D.
    update: before its sigmoid, how far the stream is replaced, B×L×D.
    candidate: what is added to the output of the attention, B×L×D.
    gate: of the mixed values, before its silu, B×L×E.
    dropout_key: None: no dropout.
    """

    stream: jax.Array
    update: jax.Array
    candidate: jax.Array
    gate: jax.Array
    dropout_key: jax.Array | None


class MegaUnit(AttentionSublayer[Pairs]):
    """Mega layer: x + σ(u) ⊙ (silu(c + (A V ⊙ silu(r)) W_o) − x), with u, c, r and Z maps of the EMA of norm(x).

    V = silu(norm(x) W_v) is a map of the stream; queries and keys are scale-offsets of silu(Z) (eq. 7–15).
    """

    owns_residual = True
    convolutions: MovingAverage  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, options: MegaOptions, chunks: ChunkOptions, *, rngs: nnx.Rngs):
        """One head, expanded width E, shared width S."""
        bias = relative_bias(options.relative_bias, options.shared_dim, config, rngs=rngs)
        # Attention within chunks only: mixed chunk attention without its global part.
        of_chunks = dataclasses.replace(chunks, local_attention=True, global_attention=False)
        core = MixedChunkCore(config, of_chunks, options.attention_function, bias)
        dim, expanded, shared = config.model_dim, options.expanded_dim, options.shared_dim
        self.core, self.rotary, self.pair_names = core, bool(config.rotary), tuple(core.pair_scaling)
        self.heads = self.key_heads = 1
        self.key_width, self.value_width, self.dropout = shared, expanded, config.dropout
        self.projection_weights = dim * (3 * expanded + shared + 2 * dim)
        self.norm = NORMS[config.norm](config)
        self.convolutions = MovingAverage(config, options, "averaged", rngs=rngs)
        self.value, self.gate = (Dense(dim, expanded, config, rngs=rngs) for _ in range(2))
        self.shared = Dense(dim, shared, config, rngs=rngs)
        self.update, self.candidate = (Dense(dim, dim, config, rngs=rngs) for _ in range(2))
        # Into the candidate, which has a bias, and not into the residual stream.
        self.output = Dense(expanded, dim, config, rngs=rngs, biased=NEVER)
        self.variants = ScaleOffsets(first_scales(core.pair_scaling, (shared,), config, of_one_source=True, rngs=rngs))

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """The stream, the values, and the input of the moving average."""
        normal = self.norm(x_BxLxD)
        return {"stream": x_BxLxD, "value": self.value(normal), "averaged": normal}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[Pairs]:
        """Queries and keys are scale-offsets of the same Z."""
        # Queries and keys come from the moving average, values from the input.
        averaged = maps["averaged"]
        variants = self.variants(silu(self.shared(averaged))[:, None])
        pairs = named_pairs(self.pair_names, variants[::2], variants[1::2])
        maps_of_average = (self.update(averaged), self.candidate(averaged), self.gate(averaged))
        residual_inputs = GatedResidual(maps["stream"], *maps_of_average, context.dropout_key)
        return Projected(self.rotate_pairs(pairs, context), silu(maps["value"])[:, None], residual_inputs)

    def finish(self, mixed_Bx1xLxE: jax.Array, residual_inputs: GatedResidual) -> jax.Array:
        """The new stream."""
        mixed = self.output(gated(residual_inputs.gate, join_heads(mixed_Bx1xLxE)))
        proposed = drop(_silu_of_sum(residual_inputs.candidate, mixed), self.dropout, residual_inputs.dropout_key)
        return _towards(residual_inputs.stream, proposed, residual_inputs.update)


# These keep their inputs, and not the intermediate results, which are cheaper to recompute than to keep.
@jax.checkpoint
def _residual_silu(x_BxLxD: jax.Array, average_BxLxD: jax.Array, omega_D: jax.Array) -> jax.Array:
    residual = omega_D.astype(jnp.float32)[None, None] * x_BxLxD.astype(jnp.float32)
    return jax.nn.silu(average_BxLxD + residual).astype(x_BxLxD.dtype)


@jax.checkpoint
def _silu_of_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.nn.silu(x + y)


@jax.checkpoint
def _towards(stream: jax.Array, proposed: jax.Array, update: jax.Array) -> jax.Array:
    return stream + jax.nn.sigmoid(update) * (proposed - stream)


def _problems(config: ModelConfig) -> list[str]:
    problems, mega = [], config[MegaOptions]
    if (config.rotary or mega.relative_bias == "rope") and mega.shared_dim % 2:
        problems.append(f"rotary positions pair dimensions: model.mega.shared_dim={mega.shared_dim} must be even")
    return problems + divisor_problems(config, mega.attention_function)


MEGA = SublayerSpec(
    MegaUnit,
    (MegaOptions, ChunkOptions),
    GATED_UNIT_KEYS,
    unread=frozenset({"chunks.local_attention", "chunks.global_attention", "chunks.zero_global", "short_convolution"}),
    defaults={"mega.expanded_dim": times(2), "mega.shared_dim": lambda config: max(2, config.model_dim // 8 * 2)},
    problems=_problems,
)
ROWS = {
    "mega": Family(
        (MEGA, MLP_SPEC),
        # Values of 2 D and a gated residual take 8.25 D², which leaves the MLP a width of 2 D, as published.
        {"mlp_dim": times(2)},
        about="softmax attention within chunks, queries and keys from an exponential moving average, gated "
        "residual, and an MLP",
        paper="Ma et al. 2022, arXiv:2209.10655",
    )
}
