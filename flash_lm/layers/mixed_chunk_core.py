"""Mixed chunk attention (FLASH): quadratic within a chunk, linear across chunks; the decode state has constant size."""

import itertools

import jax
import jax.numpy as jnp

from flash_lm.config.keys import at_least, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.layers.attention_core import Pair, Pairs, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.positions import MakeBias
from flash_lm.ops import mixed_chunk_attention as ops
from flash_lm.ops.chunk_rows import chunks_to_rows, mask_of_chunks, rows_to_sequences
from flash_lm.ops.implementations import report
from flash_lm.ops.kernels.choice import choose_backend
from flash_lm.ops.kernels.chunks import Across, attend_in_chunks
from flash_lm.ops.kernels.programs import Form
from flash_lm.ops.mixed_chunk_attention import heads_into_batch
from flash_lm.ops.mixed_chunk_decode import (
    ChunkState,
    Projections,
    Settings,
    flush_chunks,
    init_chunk_state,
    prefill_chunks,
    step_chunks,
)
from flash_lm.ops.normalizer import normalizer
from flash_lm.ops.positions import toeplitz
from flash_lm.ops.softmax_choice import softmax_by_library
from flash_lm.ops.visibility import KeySpan

# (whether chunks overlap, causal or not) -> the chunks that local attention sees, relative to that of the query.
_REACH = {(False, True): (0,), (False, False): (0,), (True, True): (-1, 0), (True, False): (-1, 0, 1)}


@section("model.chunks")
class ChunkOptions:
    """Options of mixed chunk attention."""

    size: int = key(128, "C, tokens", at_least(1))
    local_attention: bool = key(True, "attention inside the chunk")
    overlapping: bool = key(False, "local attention reaches into the neighbouring chunks, too")
    global_attention: bool = key(True, "linear attention over the chunks")
    zero_global: bool = key(
        False,
        "the scale γ of the queries of global attention starts at 0: the model starts as local attention alone, as "
        "suits weights of a Transformer",
    )

    def problems(self) -> list[str]:
        """Sentences on keys that cannot be combined."""
        if not (self.local_attention or self.global_attention):
            return ["model.chunks.local_attention and model.chunks.global_attention are both false: switch one on"]
        if self.overlapping and not self.local_attention:
            return ["model.chunks.overlapping needs local attention: set --config.model.chunks.local_attention=True"]
        if self.zero_global and not self.global_attention:
            return ["model.chunks.zero_global needs global attention: set --config.model.chunks.global_attention=True"]
        return []


class MixedChunkCore(PlainCore):
    """FLASH's mixed chunk attention (section 3.2): V̂ = V̂_local + V̂_global; each part can be switched off."""

    def __init__(
        self,
        config: ModelConfig,
        options: ChunkOptions,
        function: str = "softmax",
        bias: MakeBias | None = None,
        implementation: str = "plain",
    ):
        """A core with the local attention function `function`, and optionally a local bias.

        `implementation`: of softmax without a bias inside chunks, `model.quadratic.implementation`.
        """
        self.function, self.implementation = function, implementation
        self.normalizer = normalizer(config.normalizer, config.divides)
        self.chunk_size = options.size
        self.reach = _REACH[options.overlapping, config.causal]
        self.span = len(self.reach) * options.size  # tokens within reach of local attention
        self.local, self.global_ = options.local_attention, options.global_attention
        # Softmax alone has no N, so it decodes with any normalizer.
        divides = self.global_ or function != "softmax"
        self.undecodable = self.normalizer.undecodable if divides else None
        self.state_dtype = jnp.dtype(config.state_dtype)
        self.kernels = config.kernels
        self.bias = bias(options.size - min(self.reach) * options.size) if bias and self.local else None

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """A pair for each part that is on; scores of the local part are divided by √K."""
        parts = {"local": (self.local, True), "global": (self.global_, False)}
        return {name: is_scaled for name, (is_on, is_scaled) in parts.items() if is_on}

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        # A kernel computes local attention and causal global attention; bidirectional global attention stays with XLA.
        if backend := self._kernel(pairs, v):
            out = jnp.zeros_like(v) + self._attend_by_kernel(backend, pairs, v, context)
            both_ways = self.global_ and not context.causal
            return out + self._attend_globally(pairs["global"], v, context) if both_ways else out
        return sum(self.terms(pairs, v, context).values(), start=jnp.zeros_like(v))

    def terms(self, pairs: Pairs, v: jax.Array, context: Context) -> dict[str, jax.Array]:
        """The local and the global part separately, if they are on; their sum is the output."""
        attend = {"local": self._attend_locally, "global": self._attend_globally}
        return {name: attend[name](pairs[name], v, context) for name in self.pair_scaling}

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> ChunkState:
        """Empty chunks and a zero state of global attention; `capacity` is not used."""
        widths = (key_width * self.local, key_width * self.global_)
        return init_chunk_state(batch, heads, self.chunk_size, len(self.reach), widths, value_width, self.state_dtype)

    def prefill(self, pairs: Pairs, v: jax.Array, context: Context, state: ChunkState) -> tuple[jax.Array, ChunkState]:
        """Continues each sequence from any position in a chunk."""
        assert context.lengths_B is not None
        start_B, x = context.positions_BxL[:, 0], Projections(pairs.get("local"), pairs.get("global"), v)
        return prefill_chunks(x, state, start_B, context.lengths_B, self._settings())

    def step(self, pairs: Pairs, v: jax.Array, context: Context, state: ChunkState) -> tuple[jax.Array, ChunkState]:
        """Recurrent form: one token per sequence."""
        x = Projections(pairs.get("local"), pairs.get("global"), v)
        return step_chunks(x, state, context.positions_BxL[:, 0], self._settings())

    @property
    def flush_every(self) -> int | None:  # type: ignore[override]
        """The chunk size, if a later chunk reads the sum."""
        return self.chunk_size if self.global_ else None

    def flush(self, state: ChunkState, positions_B: jax.Array) -> ChunkState:
        """Folds complete chunks into the state of global attention."""
        return flush_chunks(state, positions_B, self.chunk_size) if self.global_ else state

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Local pairs in each chunk, and two products with the K×E state of global attention."""
        total = 0.0
        if self.local:
            # Local attention: pairs of each chunk, and of adjacent chunks if they overlap.
            full, rest = divmod(length, self.chunk_size)
            sizes = [self.chunk_size] * full + [rest]
            pairs = sum(n * (n + 1) / 2 if causal else n * n for n in sizes)
            # For each two adjacent chunks, all pairs of their tokens: once for each side that sees the other.
            pairs += (len(self.reach) - 1) * sum(a * b for a, b in itertools.pairwise(sizes))
            total += 2 * heads * pairs / length * (key_width + value_width)
        if self.global_:
            # Global attention: writing to and reading from the state of earlier chunks.
            crossing = (length - 1) // self.chunk_size * self.chunk_size  # tokens in chunks before the last
            reading = max(length - self.chunk_size, 0)  # tokens after the first chunk
            products = crossing + reading if causal else 2 * length
            total += 2 * heads * products / length * key_width * value_width
        return total

    def _settings(self) -> Settings:
        return Settings(self.chunk_size, self.reach, self.function, self.normalizer, self._biases())

    def _biases(self) -> jax.Array | None:
        """C×R×C, one C×C bias for each chunk of `reach`."""
        if self.bias is None:
            return None
        return jnp.stack([toeplitz(self._bias_of_distances(chunks)) for chunks in self.reach], axis=1)

    def _bias_of_distances(self, chunks: int = 0) -> jax.Array:
        assert self.bias is not None
        return self.bias(jnp.arange(1 - self.chunk_size, self.chunk_size, dtype=jnp.int32) + chunks * self.chunk_size)

    def _scale(self, q: jax.Array) -> float:
        return self.normalizer.scale_in_chunk(q.shape[-1], self.span, self.function)

    def _local_divisors(self, key_span: KeySpan) -> jax.Array:
        """N of each query, (B or 1)×L."""
        return self.normalizer.in_chunk(key_span.clip_to_chunks(self.chunk_size, self.reach).count(), self.span)

    def _global_weights(self, key_span: KeySpan, causal: bool, length: int) -> jax.Array:
        """1 / N of each query, (B or 1)×L; zero for a causal query in the first chunk."""
        if not causal:
            return 1 / self.normalizer.of_sum(key_span.count(), length)
        earlier_BxL = key_span.before_chunk(self.chunk_size)
        return jnp.where(earlier_BxL > 0, 1 / self.normalizer.of_sum(earlier_BxL, length), 0)

    def _kernel(self, pairs: Pairs, v: jax.Array) -> str | None:
        if self.function == "softmax":  # not a function of each score: libraries have it, and no kernel of ours
            return None
        # The kernel has local attention within one chunk only.
        without = None if self.local else "model.chunks.local_attention=False"
        if len(self.reach) > 1:
            without = "model.chunks.overlapping=True"
        queries, size = next(iter(pairs.values())).q_BxHxLxK, min(self.chunk_size, v.shape[2])
        return choose_backend(self.kernels, "mixed chunk attention", self.function, size, queries, v, without)

    def _attend_by_kernel(self, backend: str, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """The local part and, if causal, also the global part."""
        # The causal global term goes into the same kernel; a bidirectional one is added outside.
        assert context.segments is not None
        key_span, across, local = context.key_span(), None, pairs["local"]
        if self.global_ and context.causal:
            across = Across(*pairs["global"], self._global_weights(key_span, True, v.shape[2]))
        return attend_in_chunks(
            Form(self.function, self._scale(local.q_BxHxLxK), backend),
            *local,
            v,
            context.segments.runs_BxL,
            key_span,
            chunk_size=self.chunk_size,
            divisor_BxL=self._local_divisors(key_span),
            bias_W=None if self.bias is None else self._bias_of_distances(),
            across=across,
        )

    def _attend_locally(self, pair: Pair, v: jax.Array, context: Context) -> jax.Array:
        key_span = context.key_span()
        if self.function == "softmax" and (out := self._attend_by_library(pair, v, context)) is not None:
            return out
        # Heads are independent, so they are part of the batch.
        return ops.local_attention(
            heads_into_batch(pair.q_BxHxLxK),
            heads_into_batch(pair.k_BxHxLxK),
            heads_into_batch(v),
            key_span,
            chunk_size=self.chunk_size,
            function=self.function,
            scale=self._scale(pair.q_BxHxLxK),
            divisor_BxL=self._local_divisors(key_span),
            bias_CxRxC=self._biases(),
            reach=self.reach,
        ).reshape(v.shape)

    def _attend_by_library(self, pair: Pair, v: jax.Array, context: Context) -> jax.Array | None:
        """Softmax inside chunks, each of which is a sequence for a library; None: XLA compiles it."""
        part, by_xla = "softmax inside chunks", "compiled by XLA"
        if self.bias is not None or len(self.reach) > 1:
            report(part, f"{by_xla}, since libraries do not take its bias or the neighbouring chunks")
            return None
        size, (batch, _, length, _) = min(self.chunk_size, v.shape[2]), v.shape
        q, k, values = (chunks_to_rows(x, size) for x in (*pair, v))
        mask = mask_of_chunks(context.key_span(), context.structure(), size, batch)
        out = softmax_by_library(
            self.implementation, q, k, values, *mask, scale=self._scale(q), part=part, otherwise=by_xla
        )
        return None if out is None else rows_to_sequences(out, batch, length)

    def _attend_globally(self, pair: Pair, v: jax.Array, context: Context) -> jax.Array:
        segments = context.segments
        assert segments is not None
        size, (q, k, v_NxLxE) = self.chunk_size, (heads_into_batch(x) for x in (*pair, v))
        weight_BxL = self._global_weights(context.key_span(), context.causal, v.shape[2])
        # Bidirectional global attention of packed sequences needs a state per document.
        if context.causal:
            out, _ = ops.global_attention(q, k, v_NxLxE, segments.runs_BxL, chunk_size=size, weight_BxL=weight_BxL)
        elif context.packed:
            out = ops.global_attention_in_segments(q, k, v_NxLxE, segments, chunk_size=size, weight_BxL=weight_BxL)
        else:
            out = ops.global_attention_both_ways(q, k, v_NxLxE, segments.runs_BxL, weight_BxL=weight_BxL)
        return out.reshape(v.shape)
