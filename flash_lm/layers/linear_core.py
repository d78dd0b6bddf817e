"""Linear attention: φ(q)ᵀ S / φ(q)ᵀ z with S = Σ φ(k) vᵀ, z = Σ φ(k); linear in the length, constant decode state."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.layers.attention_core import Pairs, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.kernel_packages import compute_by_package
from flash_lm.ops.kernels.choice import choose_backend
from flash_lm.ops.kernels.chunks import Across, attend_in_chunks
from flash_lm.ops.kernels.programs import Form
from flash_lm.ops.linear_attention import append_ones, linear_attention, prefill_linear, ratio
from flash_lm.ops.mixed_chunk_attention import heads_into_batch


@section("model.linear")
class LinearOptions:
    """Options of linear attention."""

    chunk_size: int = key(128, "tokens processed at a time; performer rounds down to a power of two", at_least(1))


class LinearCore(PlainCore):
    """Linear attention: φ(q)ᵀ Σ φ(k) vᵀ / φ(q)ᵀ Σ φ(k) (see `ops.linear_attention`)."""

    def __init__(self, config: ModelConfig, options: LinearOptions, features: Callable[[jax.Array], jax.Array]):
        """A core with the feature map φ, which keeps the width."""
        self.features = features
        self.chunk_size = options.chunk_size
        self.kernels = config.kernels

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        # The kernels have the causal form without a prefix only.
        q, k = self.apply_feature_map(pairs, context)
        size = min(self.chunk_size, v.shape[2])
        ahead = None if context.causal else "the bidirectional form is two products"
        if context.prefix_BxL is not None:
            ahead = "a prefix has a separate sum"
        runs_BxL = context.segments.runs_BxL
        sums = compute_by_package(
            self.kernels, "linear_sums", (q, k), append_ones(v.astype(jnp.float32)), runs_BxL, ahead
        )
        if sums is not None:
            return ratio(sums).astype(v.dtype)
        backend = choose_backend(self.kernels, "linear attention", "identity", size, q, v, ahead)
        if backend is not None:
            return self._attend_by_kernel(backend, q, k, v, context)
        # XLA: heads are folded into the batch, since products with one batch dimension are faster on CPUs.
        out = linear_attention(
            heads_into_batch(q),
            heads_into_batch(k),
            heads_into_batch(v),
            context.segments,
            chunk_size=self.chunk_size,
            causal=context.causal,
            packed=context.packed,
            prefix_BxL=context.prefix_BxL,
        )
        return out.reshape(v.shape)

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """One pair, whose scores are not divided by √K."""
        return {"attention": False}

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> jax.Array:
        """The state S = Σ φ(k) [v, 1]ᵀ over no tokens; `capacity` is not used."""
        return jnp.zeros((batch, heads, key_width, value_width + 1), jnp.float32)

    def prefill(self, pairs: Pairs, v: jax.Array, context: Context, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chunkwise form from any position: the state needs no chunk grid."""
        heads = lambda x_BxL: jnp.repeat(x_BxL, v.shape[1], axis=0)
        # Tokens of a prefix see all of it, also ahead.
        first_NxL = None if context.prefix_BxL is None else heads(context.prefix_mask())
        q, k, values, sums = (heads_into_batch(x) for x in (*self.apply_feature_map(pairs, context), v, state))
        out, sums = prefill_linear(
            q, k, values, sums, heads(context.real()), chunk_size=self.chunk_size, first_NxL=first_NxL
        )
        return out.reshape(v.shape), sums.reshape(state.shape)

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """FLOPs of linear attention; the feature map has no matrix product."""
        return linear_flops(length, causal, self.chunk_size, heads, key_width, value_width)

    def apply_feature_map(self, pairs: Pairs, context: Context) -> tuple[jax.Array, jax.Array]:
        """φ(q) and φ(k), B×H×L×F float32; a subclass may use the positions."""
        del context
        q, k = pairs["attention"]
        return self.features(q.astype(jnp.float32)), self.features(k.astype(jnp.float32))

    def _attend_by_kernel(self, backend: str, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
        """Chunkwise form by a kernel: pairs inside the chunk, and the state of the chunks before it."""
        # The denominator is a further column of the values, so one pass gives both sums.
        assert context.segments is not None
        ones_BxL = jnp.ones(context.segments.runs_BxL.shape, jnp.float32)
        sums = attend_in_chunks(
            Form("identity", 1.0, backend),
            q,
            k,
            append_ones(v.astype(jnp.float32)),
            context.segments.runs_BxL,
            context.key_span(),
            chunk_size=self.chunk_size,
            divisor_BxL=ones_BxL,
            across=Across(q, k, ones_BxL),
        )
        return ratio(sums).astype(v.dtype)


def linear_flops(length: int, causal: bool, chunk_size: int, heads: int, features: int, value_width: int) -> float:
    """FLOPs per token of linear attention: `sums_flops` with the denominator as one more value."""
    return sums_flops(length, causal, chunk_size, heads, features, value_width + 1)


def sums_flops(length: int, causal: bool, chunk_size: int, heads: int, features: int, value_width: int) -> float:
    """FLOPs per token of unnormalised linear attention: pairs inside the chunk, and two products with the F×E state."""
    if not causal:
        return 2 * heads * 2 * features * value_width
    pairs, products = chunk_work(length, chunk_size)
    return 2 * heads * (pairs * (features + value_width) + products * features * value_width) / length


def chunk_work(length: int, chunk_size: int) -> tuple[float, int]:
    """Chunkwise form of a causal sequence: visible pairs inside the chunks, and products of a token with the state."""
    # Causal pairs inside full chunks and the last one; states are read by all chunks but the first.
    full, rest = divmod(length, chunk_size)
    pairs = sum(n * (n + 1) / 2 for n in [chunk_size] * full + [rest])
    crossing = (length - 1) // chunk_size * chunk_size  # tokens in chunks before the last
    reading = max(length - chunk_size, 0)  # tokens after the first chunk
    return pairs, crossing + reading
