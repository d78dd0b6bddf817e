"""Cross attention: tokens attend to a second sequence, the memory; decoding reads its keys and values once."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.errors import InputError
from flash_lm.layers.attention import (
    ScaleOffsets,
    first_scales,
    gated,
    join_heads,
    normalised,
    query_key_norms,
    silu,
    split_heads,
)
from flash_lm.layers.context import Context, Memory
from flash_lm.layers.dense import Dense
from flash_lm.layers.sublayer import State, Sublayer
from flash_lm.ops.linear_attention import elu_plus_one, ratio, with_ones
from flash_lm.ops.products import matmul
from flash_lm.ops.quadratic_attention import quadratic_attention
from flash_lm.ops.sight import Sight
from flash_lm.schema import at_least, key, one_of, section

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


class CrossCore(Protocol):
    """Mixes the values of a memory; linear in them."""

    def __call__(self, q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, memory: Memory) -> jax.Array:
        """B×H×L×E, what each token reads of the memory that it sees."""
        ...

    def init_state(self, batch: int, heads: int, length: int, key_width: int, value_width: int) -> State:
        """The state before a memory of at most `length` tokens is read."""
        ...

    def hold(self, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, lengths_B: jax.Array, state: Any) -> State:
        """The state with this memory, of which the first tokens of each row are real."""
        ...

    def read(self, q_BxHxLxK: jax.Array, state: Any) -> jax.Array:
        """B×H×L×E, from the whole memory of the state."""
        ...

    def is_empty(self, state: Any) -> jax.Array:
        """Which rows have no memory, B."""
        ...

    def flops_per_token(self, length: int, heads: int, key_width: int, value_width: int) -> float:
        """For memories of `length` tokens and rows as long."""
        ...


class HeldPairs(NamedTuple):
    """Keys and values of a memory, and how many of them are real."""

    key_BxHxMxK: jax.Array
    value_BxHxMxE: jax.Array
    lengths_B: jax.Array


class PairsCore(nnx.Module):
    """f(q kᵀ / √K) / N · v over the memory that a token sees; N is its length, and softmax has none."""

    def __init__(self, function: str, config: ModelConfig):
        """`function`: a name of `ATTENTION_FUNCTIONS`."""
        self.function, self.state_dtype = function, jnp.dtype(config.state_dtype)

    def __call__(self, q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, memory: Memory) -> jax.Array:
        """See `CrossCore`."""
        return self._attend(q_BxHxLxK, k_BxHxMxK, v_BxHxMxE, memory.sight())

    def init_state(self, batch: int, heads: int, length: int, key_width: int, value_width: int) -> HeldPairs:
        """See `CrossCore`."""
        empty = lambda width: jnp.zeros((batch, heads, length, width), self.state_dtype)
        return HeldPairs(empty(key_width), empty(value_width), jnp.zeros(batch, jnp.int32))

    def hold(self, k_BxHxMxK, v_BxHxMxE, lengths_B: jax.Array, state: HeldPairs) -> HeldPairs:
        """See `CrossCore`."""
        put = lambda old, new: old.at[:, :, : new.shape[2]].set(new.astype(old.dtype))
        return HeldPairs(put(state.key_BxHxMxK, k_BxHxMxK), put(state.value_BxHxMxE, v_BxHxMxE), lengths_B)

    def read(self, q_BxHxLxK: jax.Array, state: HeldPairs) -> jax.Array:
        """See `CrossCore`."""
        stop_BxL = jnp.broadcast_to(state.lengths_B[:, None], (len(state.lengths_B), q_BxHxLxK.shape[2]))
        zeros_BxL = jnp.zeros_like(stop_BxL)
        q = q_BxHxLxK.astype(state.key_BxHxMxK.dtype)
        sight = Sight(zeros_BxL, zeros_BxL, stop_BxL)
        return self._attend(q, state.key_BxHxMxK, state.value_BxHxMxE, sight).astype(q_BxHxLxK.dtype)

    def is_empty(self, state: HeldPairs) -> jax.Array:
        """See `CrossCore`."""
        return state.lengths_B == 0

    def flops_per_token(self, length: int, heads: int, key_width: int, value_width: int) -> float:
        """See `CrossCore`."""
        return 2 * heads * length * (key_width + value_width)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> jax.Array:
        return quadratic_attention(
            q,
            k,
            v,
            sight,
            function=self.function,
            scale=q.shape[-1] ** -0.5,
            divisor_BxL=jnp.maximum(sight.count(), 1).astype(jnp.float32),
            blocked=True,
        )


class SumsCore(nnx.Module):
    """φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k) over the memory that a token sees, φ = elu + 1.

    It is eq. 5 of "Transformers are RNNs" (Katharopoulos et al. 2020) for keys of another sequence.
    """

    def __call__(self, q_BxHxLxK: jax.Array, k_BxHxMxK: jax.Array, v_BxHxMxE: jax.Array, memory: Memory) -> jax.Array:
        """See `CrossCore`; rows with several documents take the product over all pairs."""
        q, values = _features(q_BxHxLxK), with_ones(v_BxHxMxE)
        if memory.packed:
            sight, k = memory.sight(), _features(k_BxHxMxK)
            ones = jnp.ones(sight.count().shape, jnp.float32)
            sums = quadratic_attention(q, k, values, sight, function="identity", scale=1.0, divisor_BxL=ones)
            return ratio(sums).astype(v_BxHxMxE.dtype)
        return _read(q, _sums(k_BxHxMxK, values, memory.lengths_B), v_BxHxMxE.dtype)

    def init_state(self, batch: int, heads: int, length: int, key_width: int, value_width: int) -> jax.Array:
        """See `CrossCore`."""
        return jnp.zeros((batch, heads, key_width, value_width + 1), jnp.float32)

    def hold(self, k_BxHxMxK, v_BxHxMxE, lengths_B: jax.Array, state: jax.Array) -> jax.Array:
        """See `CrossCore`."""
        del state
        return _sums(k_BxHxMxK, with_ones(v_BxHxMxE), lengths_B)

    def read(self, q_BxHxLxK: jax.Array, state: jax.Array) -> jax.Array:
        """See `CrossCore`."""
        return _read(_features(q_BxHxLxK), state, q_BxHxLxK.dtype)

    def is_empty(self, state: jax.Array) -> jax.Array:
        """See `CrossCore`; features are positive, and so are their sums."""
        return (state[..., -1] == 0).all(axis=(1, 2))

    def flops_per_token(self, length: int, heads: int, key_width: int, value_width: int) -> float:
        """See `CrossCore`: a product of the memory's token, and one of the row's; the denominator is one more value."""
        return 4 * heads * key_width * (value_width + 1)


def _features(x: jax.Array) -> jax.Array:
    return elu_plus_one(x.astype(jnp.float32))


def _sums(k_BxHxMxK: jax.Array, values: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Σ φ(k) [v, 1]ᵀ over the first tokens of each row, B×H×K×(E+1) float32."""
    real_BxM = jnp.arange(k_BxHxMxK.shape[2], dtype=jnp.int32)[None] < lengths_B[:, None]
    return matmul(jnp.where(real_BxM[:, None, :, None], _features(k_BxHxMxK), 0), values, transpose_a=True)


def _read(q: jax.Array, sums: jax.Array, dtype: Any) -> jax.Array:
    return ratio(matmul(q, sums)).astype(dtype)


class CrossSublayer(Sublayer):
    """Queries from the tokens, keys and values from the memory; subclasses define the projections.

    Attributes:
        memory_length: most tokens in a memory that decoding holds.
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
        """Keys, B×H×M×K, and values, B×H×M×E, of a memory."""
        raise TypeError(f"{type(self).__name__} must define keys_values")

    def finish(self, mixed_BxHxLxE: jax.Array, gate: Any) -> jax.Array:
        """From the core's output to B×L×D."""
        raise TypeError(f"{type(self).__name__} must define finish")

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """B×L×D.

        Raises:
            InputError: there is no memory.
        """
        if context.memory is None:
            raise InputError("this model has an encoder, and reads a source beside its tokens: give one")
        q, gate = self.queries(x_BxLxD)
        return self.finish(self.core(q, *self.keys_values(context.memory.x_BxMxD), context.memory), gate)

    def init_state(self, batch_size: int, capacity: int) -> State:
        """Of no memory; `capacity` is not used, since the memory does not grow."""
        del capacity
        return self.core.init_state(batch_size, self.heads, self.memory_length, self.key_width, self.value_width)

    def remember(self, x_BxMxD: jax.Array, lengths_B: jax.Array, state: State) -> State:
        """See `Sublayer`."""
        return self.core.hold(*self.keys_values(x_BxMxD), lengths_B, state)

    def prefill(self, x_BxLxD: jax.Array, context: Context, state: State) -> tuple[jax.Array, State]:
        """Reads the memory of the state, which stays as it is; NaN in rows that have none."""
        if x_BxLxD.shape[1] == 0:
            return x_BxLxD, state
        q, gate = self.queries(x_BxLxD)
        y_BxLxD = self.finish(self.core.read(q, state), gate)
        return jnp.where(self.core.is_empty(state)[:, None, None], jnp.nan, y_BxLxD), state

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Projections and core, for memories of `length` tokens and rows as long."""
        core = self.core.flops_per_token(length, self.heads, self.key_width, self.value_width)
        return 2 * self.projection_weights + core


class CrossAttention(CrossSublayer):
    """Attention in H heads, then W_o ("Attention Is All You Need", section 3.2.3), with softmax or by feature maps."""

    def __init__(self, core: CrossCore, options: CrossOptions, config: ModelConfig, *, rngs: nnx.Rngs):
        """H heads of width D / H."""
        dim = config.model_dim
        self.core, self.heads, self.memory_length = core, options.heads, config.max_length
        self.key_width = self.value_width = dim // self.heads
        self.projection_weights = 4 * dim**2
        self.query, self.key, self.value, self.output = (Dense(dim, dim, config, rngs=rngs) for _ in range(4))
        self.query_norm, self.key_norm = query_key_norms(config, self.key_width)

    def queries(self, x_BxLxD: jax.Array) -> tuple[jax.Array, Any]:
        """Without a gate."""
        return normalised(split_heads(self.query(x_BxLxD), self.heads), self.query_norm), None

    def keys_values(self, x_BxMxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `CrossSublayer`."""
        k = normalised(split_heads(self.key(x_BxMxD), self.heads), self.key_norm)
        return k, split_heads(self.value(x_BxMxD), self.heads)

    def finish(self, mixed_BxHxLxE: jax.Array, gate: Any) -> jax.Array:
        """Joins the heads."""
        return self.output(join_heads(mixed_BxHxLxE))


class CrossGatedUnit(CrossSublayer):
    """(U ⊙ A V) W_o with U = silu(x W_u), V = silu(m W_v), for tokens x and a memory m.

    A = f(q kᵀ / √S) / M with q and k the scale-offsets of silu(x W_q) and silu(m W_k), a map for each sequence, since
    one Z for both would ask them to share a space; FLASH (section 2) has no cross attention. With several heads V is
    split among them, and each has its own scale-offsets.
    """

    def __init__(self, core: CrossCore, options: CrossOptions, config: ModelConfig, *, rngs: nnx.Rngs):
        """Expanded width E, shared width S, H heads."""
        dim, expanded, shared = config.model_dim, options.expanded_dim, options.shared_dim
        self.core, self.heads, self.memory_length = core, options.heads, config.max_length
        self.key_width, self.value_width = shared, expanded // self.heads
        self.projection_weights = 3 * dim * expanded + 2 * dim * shared
        self.gate, self.value = (Dense(dim, expanded, config, rngs=rngs) for _ in range(2))
        self.query, self.key = (Dense(dim, shared, config, rngs=rngs) for _ in range(2))
        self.output = Dense(expanded, dim, config, rngs=rngs)
        width = (shared,) if self.heads == 1 else (self.heads, shared)
        scales = first_scales({"attention": True}, width, config, rngs=rngs)
        self.query_variant, self.key_variant = ScaleOffsets(scales[:1]), ScaleOffsets(scales[1:])

    def queries(self, x_BxLxD: jax.Array) -> tuple[jax.Array, Any]:
        """With U, before its silu."""
        (q,) = self.query_variant(silu(self.query(x_BxLxD))[:, None])
        return q, self.gate(x_BxLxD)

    def keys_values(self, x_BxMxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `CrossSublayer`."""
        (k,) = self.key_variant(silu(self.key(x_BxMxD))[:, None])
        return k, split_heads(silu(self.value(x_BxMxD)), self.heads)

    def finish(self, mixed_BxHxLxE: jax.Array, gate: Any) -> jax.Array:
        """Gates with U."""
        return self.output(gated(gate, join_heads(mixed_BxHxLxE)))
