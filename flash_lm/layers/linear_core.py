"""Attention core whose softmax is replaced by features: linear in the length, and decoded from one sum a head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.context import Context
from flash_lm.ops.kernels.choice import choose
from flash_lm.ops.linear_attention import linear_attention, linear_attention_by_kernel, prefill_linear
from flash_lm.ops.mixed_chunk_decode import fold
from flash_lm.schema import at_least, key, section


@section("model.linear")
class LinearOptions:
    """Of attention by features, over all earlier tokens."""

    chunk_size: int = key(128, "tokens that are taken at a time; performer takes the power of two below", at_least(1))


class LinearCore(nnx.Module):
    """φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k) (see `ops.linear_attention`)."""

    scaled = (False,)  # one pair of queries and keys, whose scores are not divided by √K
    state_grows = False
    longest = None
    undecodable = None

    def __init__(self, features: Callable[[jax.Array], jax.Array], options: LinearOptions, config: ModelConfig):
        """Core with the feature map φ, which keeps the width."""
        self.features = features
        self.chunk_size = options.chunk_size
        self.kernels = config.kernels

    def __call__(self, qk: tuple[tuple[jax.Array, jax.Array], ...], v: jax.Array, context: Context) -> jax.Array:
        """One pair of B×H×L×K queries and keys, B×H×L×E values -> B×H×L×E."""
        assert context.segments is not None
        q, k = self._featured(qk)
        size = min(self.chunk_size, v.shape[2])
        both_ways = None if context.causal else "bidirectional, it is two products"
        backend = choose(self.kernels, "linear attention", "identity", size, q, v, both_ways)
        if backend is not None:
            return linear_attention_by_kernel(backend, q, k, v, context.segments, chunk_size=self.chunk_size)
        out = linear_attention(
            fold(q),
            fold(k),
            fold(v),
            context.segments,
            chunk_size=self.chunk_size,
            causal=context.causal,
            packed=context.packed,
        )
        return out.reshape(v.shape)

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """Σ φ(k) [v, 1]ᵀ of no tokens; `capacity` bounds nothing here."""
        return jnp.zeros((batch, heads, key_width, value_width + 1), jnp.float32)

    def prefill(self, qk, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """In chunks from wherever the row stands: the sum needs no grid."""
        assert context.lengths_B is not None
        real_BxL = jnp.arange(v.shape[2])[None] < context.lengths_B[:, None]
        real_NxL = jnp.repeat(real_BxL, v.shape[1], axis=0)
        q, k = (fold(x) for x in self._featured(qk))
        out, sums = prefill_linear(q, k, fold(v), fold(state), real_NxL, chunk_size=self.chunk_size)
        return out.reshape(v.shape), sums.reshape(state.shape)

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """As `linear_flops`; the feature map is no product."""
        return linear_flops(length, causal, self.chunk_size, heads, key_width, value_width)

    def _featured(self, qk) -> tuple[jax.Array, jax.Array]:
        ((q, k),) = qk
        return self.features(q.astype(jnp.float32)), self.features(k.astype(jnp.float32))


def linear_flops(length: int, causal: bool, chunk_size: int, heads: int, features: int, value_width: int) -> float:
    """A token: pairs inside the chunk, and two products with the F×(E+1) sum where there is one to make or to read."""
    value_width += 1  # the denominator
    if not causal:
        return 2 * heads * 2 * features * value_width
    full, rest = divmod(length, chunk_size)
    pairs = sum(n * (n + 1) / 2 for n in [chunk_size] * full + [rest])
    crossing = (length - 1) // chunk_size * chunk_size  # tokens in chunks before the last
    reading = max(length - chunk_size, 0)  # tokens after the first chunk
    products = (crossing + reading) * features * value_width
    return 2 * heads * (pairs * (features + value_width) + products) / length
