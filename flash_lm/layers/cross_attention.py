"""Cross attention: queries from the tokens, keys and values from a second sequence, the memory."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.errors import InputError
from flash_lm.layers.attention import (
    apply_qk_norm,
    join_heads,
    query_key_norms,
    split_heads,
)
from flash_lm.layers.context import Context
from flash_lm.layers.cross_core import CrossCore
from flash_lm.layers.dense import QUERY_KEY_VALUE, Dense, Output
from flash_lm.layers.scale_offsets import ScaleOffsets, first_scales
from flash_lm.layers.sublayer import State, Sublayer
from flash_lm.ops.activations import gated, silu

KINDS = ("softmax", "gau", "linear")


@section("model.cross")
class CrossOptions:
    """Options of cross attention, in a model with an encoder."""

    kind: str = key(
        "softmax",
        "softmax or linear (elu + 1): attention in heads; gau: a gated attention unit whose values are the memory's",
        one_of(*KINDS),
    )
    heads: int = key(None, "heads; open: model.num_heads, but 1 of a gau, which share Z and split E", at_least(1))
    expanded_dim: int = key(None, "E of a gau; open: 2 D", at_least(1))
    shared_dim: int = key(64, "S of a gau, width of the queries and keys", at_least(1))
    attention_function: str = key("relu2", "of a gau: relu2, softmax or laplace", one_of("relu2", "softmax", "laplace"))


class CrossSublayer(Sublayer):
    """A cross attention sublayer; subclasses define the projections.

    Attributes:
        memory_length: most tokens of a memory in the decode state.
    """

    core: CrossCore
    heads: int
    key_width: int
    value_width: int
    projection_weights: int  # number of weights in all linear maps
    memory_length: int
    uncarried = "a model with an encoder reads a source for each row: it has no state that goes on from row to row"

    def queries(self, x_BxLxD: jax.Array) -> tuple[jax.Array, Any]:
        """Queries, B×H×L×K, and what `finish` needs besides the mixed values."""
        raise TypeError(f"{type(self).__name__} must define queries")

    def keys_values(self, x_BxMxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys, B×H×M×K, and values, B×H×M×E, from the memory."""
        raise TypeError(f"{type(self).__name__} must define keys_values")

    def finish(self, mixed_BxHxLxE: jax.Array, gate: Any) -> jax.Array:
        """Output projection: from the output of the core to B×L×D."""
        raise TypeError(f"{type(self).__name__} must define finish")

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """B×L×D.

        Raises:
            InputError: no memory.
        """
        if context.memory is None:
            raise InputError("this model has an encoder, and reads a source in addition to its tokens: give one")
        # Queries from the sequence, keys and values from the memory.
        q, gate = self.queries(x_BxLxD)
        return self.finish(self.core(q, *self.keys_values(context.memory.x_BxMxD), context.memory), gate)

    def init_state(self, batch_size: int, capacity: int) -> State:
        """The state without a memory; `capacity` is not used, since the memory does not grow."""
        del capacity
        return self.core.init_state(batch_size, self.heads, self.memory_length, self.key_width, self.value_width)

    def cache_memory(self, x_BxMxD: jax.Array, lengths_B: jax.Array, state: State) -> State:
        """See `Sublayer`."""
        return self.core.hold(*self.keys_values(x_BxMxD), lengths_B, state)

    def prefill(self, x_BxLxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """Reads the memory of the state, which stays as it is; NaN in sequences that have none."""
        if x_BxLxD.shape[1] == 0:
            return x_BxLxD, state
        # Decoding projects the memory once (`cache_memory`), and then only queries.
        q, gate = self.queries(x_BxLxD)
        y_BxLxD = self.finish(self.core.read(q, state), gate)
        return jnp.where(self.core.is_empty(state)[:, None, None], jnp.nan, y_BxLxD), state

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Projections and core, for memories and sequences of `length` tokens."""
        core = self.core.flops_per_token(length, self.heads, self.key_width, self.value_width)
        return 2 * self.projection_weights + core


class CrossAttention(CrossSublayer):
    """Multi-head cross attention ("Attention Is All You Need", section 3.2.3), with softmax or linear attention."""

    def __init__(self, config: ModelConfig, options: CrossOptions, core: CrossCore, *, rngs: nnx.Rngs):
        """H heads of width model.head_dim, or else D / H."""
        # Queries from the decoder, keys and values from the encoder.
        dim = config.model_dim
        self.core, self.heads, self.memory_length = core, options.heads, config.max_length
        self.key_width = self.value_width = config.head_dim or dim // self.heads
        joined = self.heads * self.value_width
        self.projection_weights = 4 * dim * joined
        dense = lambda: Dense(dim, joined, config, rngs=rngs, biased=QUERY_KEY_VALUE)
        self.query, self.key, self.value = (dense() for _ in range(3))
        self.output = Output(joined, dim, config, rngs=rngs)
        self.query_norm, self.key_norm = query_key_norms(config, self.key_width)

    def queries(self, x_BxLxD: jax.Array) -> tuple[jax.Array, Any]:
        """Queries, and no gate."""
        return apply_qk_norm(split_heads(self.query(x_BxLxD), self.heads), self.query_norm), None

    def keys_values(self, x_BxMxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `CrossSublayer`."""
        k = apply_qk_norm(split_heads(self.key(x_BxMxD), self.heads), self.key_norm)
        return k, split_heads(self.value(x_BxMxD), self.heads)

    def finish(self, mixed_BxHxLxE: jax.Array, gate: Any) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))


class CrossGatedUnit(CrossSublayer):
    """GAU cross attention: (U ⊙ A V) W_o with U = silu(x W_u), V = silu(m W_v), for tokens x and a memory m.

    A = f(q kᵀ / √S) / M with q and k the scale-offsets of silu(x W_q) and silu(m W_k), a map for each sequence, since
    one Z for both would ask them to share a space; FLASH (section 2) has no cross attention. With several heads V is
    split among them, and scale-offsets are per head.
    """

    def __init__(self, config: ModelConfig, options: CrossOptions, core: CrossCore, *, rngs: nnx.Rngs):
        """Expanded width E, shared width S, H heads."""
        dim, expanded, shared = config.model_dim, options.expanded_dim, options.shared_dim
        # V is split among the heads; all heads make queries and keys from the same S channels.
        self.core, self.heads, self.memory_length = core, options.heads, config.max_length
        self.key_width, self.value_width = shared, expanded // self.heads
        self.projection_weights = 3 * dim * expanded + 2 * dim * shared
        self.gate, self.value = (Dense(dim, expanded, config, rngs=rngs) for _ in range(2))
        self.query, self.key = (Dense(dim, shared, config, rngs=rngs) for _ in range(2))
        self.output = Output(expanded, dim, config, rngs=rngs)
        width = (shared,) if self.heads == 1 else (self.heads, shared)
        scales = first_scales({"attention": True}, width, config, of_one_source=False, rngs=rngs)
        self.query_variant, self.key_variant = ScaleOffsets(scales[:1]), ScaleOffsets(scales[1:])

    def queries(self, x_BxLxD: jax.Array) -> tuple[jax.Array, Any]:
        """Queries, and the gate U before its silu."""
        (q,) = self.query_variant(silu(self.query(x_BxLxD))[:, None])
        return q, self.gate(x_BxLxD)

    def keys_values(self, x_BxMxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `CrossSublayer`."""
        (k,) = self.key_variant(silu(self.key(x_BxMxD))[:, None])
        return k, split_heads(silu(self.value(x_BxMxD)), self.heads)

    def finish(self, mixed_BxHxLxE: jax.Array, gate: Any) -> jax.Array:
        """Gates with U."""
        return self.output(gated(gate, join_heads(mixed_BxHxLxE)))
