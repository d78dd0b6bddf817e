"""Attention core that mixes chunks: quadratic inside each, linear over them; decodes from a state of constant size."""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.context import Context
from flash_lm.layers.normalizer import constant, divisor, scale, undecodable
from flash_lm.layers.positions import MakeBias
from flash_lm.ops import mixed_chunk_attention as ops
from flash_lm.ops.kernels.choice import choose
from flash_lm.ops.kernels.programs import Form
from flash_lm.ops.kernels.rows import Across, attend_in_chunks
from flash_lm.ops.mixed_chunk_decode import (
    ChunkState,
    Projections,
    Settings,
    fold,
    init_chunk_state,
    prefill_chunks,
    step_chunks,
)
from flash_lm.ops.positions import toeplitz
from flash_lm.ops.segments import tokens_in_earlier_chunks, visible_keys_in_chunk
from flash_lm.schema import at_least, key, section

# Whether chunks overlap, and causal or not -> the chunks that a query's local attention sees, counted from its own.
_REACH = {(False, True): (0,), (False, False): (0,), (True, True): (-1, 0), (True, False): (-1, 0, 1)}
_OVERLAPPING = "model.chunks.overlapping=True is for training and scoring: a state holds the current chunk alone"


@section("model.chunks")
class ChunkOptions:
    """Of mixed chunk attention."""

    size: int = key(128, "C, tokens", at_least(1))
    local_attention: bool = key(True, "attention inside the chunk")
    overlapping: bool = key(
        False, "local attention reaches into the neighbouring chunks, too; not to be decoded", before=False
    )
    global_attention: bool = key(True, "linear attention over the chunks")

    def problems(self) -> list[str]:
        """Sentences on keys that do not go together."""
        if not (self.local_attention or self.global_attention):
            return ["model.chunks.local_attention and model.chunks.global_attention are both false: switch one on"]
        if self.overlapping and not self.local_attention:
            return ["model.chunks.overlapping is of local attention: set --config.model.chunks.local_attention=True"]
        return []


class MixedChunkCore(nnx.Module):
    """FLASH's mixed chunk attention (section 3.2): V̂ = V̂_local + V̂_global, each of which can be switched off."""

    state_grows = False
    longest = None

    def __init__(self, function: str, bias: MakeBias | None, options: ChunkOptions, config: ModelConfig):
        """Core of a family whose local attention function is `function`, and perhaps with a local bias."""
        self.function = function
        self.normalizer = config.normalizer
        self.chunk_size = options.size
        self.reach = _REACH[options.overlapping, config.causal]
        self.span = len(self.reach) * options.size  # tokens that local attention reaches over
        self.local, self.global_ = options.local_attention, options.global_attention
        overlapping = _OVERLAPPING if options.overlapping else None
        self.undecodable = undecodable(config.normalizer) or overlapping
        self.scaled = (True,) * self.local + (False,) * self.global_  # a pair for each part
        self.dtype = config.dtype
        self.kernels = config.kernels
        self.bias = bias(options.size - min(self.reach) * options.size) if bias and self.local else None

    def __call__(self, qk: tuple[tuple[jax.Array, jax.Array], ...], v: jax.Array, context: Context) -> jax.Array:
        """A pair of B×H×L×K queries and keys for each part that is on, B×H×L×E values -> B×H×L×E."""
        x, out, size = self._named(qk, v), jnp.zeros_like(v), min(self.chunk_size, v.shape[2])
        without = None if self.local else "model.chunks.local_attention=False"
        if len(self.reach) > 1:
            without = "model.chunks.overlapping=True"
        backend = choose(self.kernels, "mixed chunk attention", self.function, size, qk[0][0], v, without)
        if backend is not None:
            out += self._attend_by_kernel(backend, x, context)
        elif x.local is not None:
            out += self._attend_locally(*x.local, v, context)
        if x.global_ is not None and not (backend and context.causal):
            out += self._attend_globally(*x.global_, v, context)
        return out

    def parts(
        self, qk: tuple[tuple[jax.Array, jax.Array], ...], v: jax.Array, context: Context
    ) -> dict[str, jax.Array]:
        """The local and the global part apart, those that are on; their sum is the output."""
        x, found = self._named(qk, v), {}
        if x.local is not None:
            found["local"] = self._attend_locally(*x.local, v, context)
        if x.global_ is not None:
            found["global"] = self._attend_globally(*x.global_, v, context)
        return found

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> ChunkState:
        """An empty chunk and a zero sum; `capacity` bounds nothing here."""
        return init_chunk_state(batch, heads, self.chunk_size, key_width, value_width, jnp.dtype(self.dtype))

    def prefill(self, qk, v: jax.Array, context: Context, state: ChunkState) -> tuple[jax.Array, ChunkState]:
        """From anywhere in a chunk, row by row."""
        assert context.lengths_B is not None
        start_B = context.positions_BxL[:, 0]
        return prefill_chunks(self._named(qk, v), state, start_B, context.lengths_B, self._settings(qk))

    def step(self, qk, v: jax.Array, context: Context, state: ChunkState) -> tuple[jax.Array, ChunkState]:
        """One token a row."""
        return step_chunks(self._named(qk, v), state, context.positions_BxL[:, 0], self._settings(qk))

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Local pairs in each chunk, and two products with the K×E sum where there is one to make or to read."""
        total = 0.0
        if self.local:
            full, rest = divmod(length, self.chunk_size)
            sizes = [self.chunk_size] * full + [rest]
            pairs = sum(n * (n + 1) / 2 if causal else n * n for n in sizes)
            # Of each two chunks that touch, every token with every one: once for each side that sees the other.
            pairs += (len(self.reach) - 1) * sum(a * b for a, b in itertools.pairwise(sizes))
            total += 2 * heads * pairs / length * (key_width + value_width)
        if self.global_:
            crossing = (length - 1) // self.chunk_size * self.chunk_size  # tokens in chunks before the last
            reading = max(length - self.chunk_size, 0)  # tokens after the first chunk
            products = crossing + reading if causal else 2 * length
            total += 2 * heads * products / length * key_width * value_width
        return total

    def _named(self, qk, v: jax.Array) -> Projections:
        pairs = iter(qk)
        return Projections(next(pairs) if self.local else None, next(pairs) if self.global_ else None, v)

    def _settings(self, qk) -> Settings:
        return Settings(
            chunk_size=self.chunk_size,
            function=self.function,
            scale=scale(self.normalizer, qk[0][0].shape[-1], self.span, self.function),
            bias_CxRxC=self._biases(),
            local_divisor=self._local_divisor(),
            global_divisor=constant(self.normalizer, 0),
        )

    def _biases(self) -> jax.Array | None:
        """C×R×C, for each chunk of `reach`."""
        if self.bias is None:
            return None
        return jnp.stack([toeplitz(self._bias_of_distances(chunks)) for chunks in self.reach], axis=1)

    def _bias_of_distances(self, chunks: int = 0) -> jax.Array:
        assert self.bias is not None
        return self.bias(jnp.arange(1 - self.chunk_size, self.chunk_size, dtype=jnp.int32) + chunks * self.chunk_size)

    def _local_divisor(self) -> int | None:
        """N of the local part; see layers/normalizer.py."""
        return self.span if self.normalizer.isdecimal() else constant(self.normalizer, self.span)

    def _local_divisors(self, context: Context) -> jax.Array:
        """N of each query, (B or 1)×L."""
        assert context.segments is not None
        count_BxL = visible_keys_in_chunk(context.segments, self.chunk_size, context.causal, self.reach)
        n = self._local_divisor()
        return (count_BxL if n is None else jnp.full_like(count_BxL, n)).astype(jnp.float32)

    def _global_weights(self, length: int, context: Context) -> jax.Array:
        """1 / N of each query, (B or 1)×L, and zero where a causal query has no chunk before its own."""
        assert context.segments is not None
        # The linear part has no function f, so the paper's scale of the scores becomes its divisor.
        normalizer = "length" if self.normalizer == "paper" else self.normalizer
        if not context.causal:
            return 1 / divisor(normalizer, context.segments.lengths_BxL, length)
        earlier_BxL = tokens_in_earlier_chunks(context.segments, self.chunk_size)
        return jnp.where(earlier_BxL > 0, 1 / divisor(normalizer, earlier_BxL, length), 0)

    def _attend_by_kernel(self, backend: str, x: Projections, context: Context) -> jax.Array:
        """The local part, and if causal the global one with it."""
        assert context.segments is not None and x.local is not None
        width, size = x.local[0].shape[-1], self.chunk_size
        across = None
        if x.global_ is not None and context.causal:
            across = Across(*x.global_, self._global_weights(x.v_BxHxLxE.shape[2], context))
        return attend_in_chunks(
            Form(self.function, scale(self.normalizer, width, size, self.function), backend),
            *x.local,
            x.v_BxHxLxE,
            context.segments,
            chunk_size=size,
            causal=context.causal,
            divisor_BxL=self._local_divisors(context),
            bias_W=None if self.bias is None else self._bias_of_distances(),
            across=across,
        )

    def _attend_locally(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
        assert context.segments is not None
        settings = self._settings(((q, k),))
        return ops.local_attention(
            fold(q),
            fold(k),
            fold(v),
            context.segments.runs_BxL,
            chunk_size=self.chunk_size,
            causal=context.causal,
            function=settings.function,
            scale=settings.scale,
            divisor_BxL=self._local_divisors(context),
            bias_CxRxC=settings.bias_CxRxC,
            reach=self.reach,
        ).reshape(v.shape)

    def _attend_globally(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
        segments = context.segments
        assert segments is not None
        size, arrays = self.chunk_size, (fold(q), fold(k), fold(v))
        weight_BxL = self._global_weights(q.shape[2], context)
        if context.causal:
            out, _ = ops.global_attention(*arrays, segments.runs_BxL, chunk_size=size, weight_BxL=weight_BxL)
        elif context.packed:
            out = ops.global_attention_in_segments(*arrays, segments, chunk_size=size, weight_BxL=weight_BxL)
        else:
            out = ops.global_attention_both_ways(*arrays, segments.runs_BxL, weight_BxL=weight_BxL)
        return out.reshape(v.shape)
