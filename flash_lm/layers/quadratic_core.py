"""Quadratic attention over all pairs of tokens, with a KV cache for decoding."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from flash_lm.config.keys import key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.layers.attention_core import Pairs, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.positions import MakeBias
from flash_lm.ops.implementations import report
from flash_lm.ops.kernels.choice import choose_backend
from flash_lm.ops.kernels.chunks import attend_in_chunks
from flash_lm.ops.kernels.programs import Form
from flash_lm.ops.kv_cache import write
from flash_lm.ops.normalizer import normalizer
from flash_lm.ops.quadratic_attention import quadratic_attention
from flash_lm.ops.softmax_choice import IMPLEMENTATIONS, PART, check_request, softmax_by_library
from flash_lm.ops.visibility import KeySpan, MaskStructure

_SMALLEST_SHARE = 512  # slots of the cache


@section("model.quadratic")
class QuadraticOptions:
    """Options of quadratic attention."""

    implementation: str = key(
        "auto",
        "of softmax: auto (cudnn on a GPU and splash on a TPU, where they can; else blocked), plain (all pairs at "
        "once), blocked, cudnn, splash, tokamax (if installed); other functions are plain or blocked",
        one_of(*IMPLEMENTATIONS),
        same=("blocked",),
    )


def compiled_by_xla(config: ModelConfig) -> ModelConfig:
    """The config of the same model without kernels and libraries, for programs that must not contain them."""
    plain = config.get("quadratic.implementation") == "plain"
    return config.put("kernels", "xla").put("quadratic.implementation", "plain" if plain else "blocked")


class KeyValueCache(NamedTuple):
    """KV cache: keys and values of all tokens so far, at their positions."""

    key_BxHxMxK: jax.Array
    value_BxHxMxE: jax.Array

    @classmethod
    def empty(
        cls, batch: int, heads: int, capacity: int, key_width: int, value_width: int, dtype: jnp.dtype
    ) -> "KeyValueCache":
        """An empty KV cache for `capacity` tokens per sequence."""
        return cls(*(jnp.zeros((batch, heads, capacity, width), dtype) for width in (key_width, value_width)))

    def append_tokens(self, k_BxHxLxK: jax.Array, v_BxHxLxE: jax.Array, context: Context) -> "KeyValueCache":
        """The KV cache with new tokens at their positions; padding is out of range and is dropped."""
        slot_BxL = jnp.where(context.real(), context.positions_BxL, self.key_BxHxMxK.shape[2])
        return KeyValueCache(*(write(old, x, slot_BxL) for old, x in zip(self, (k_BxHxLxK, v_BxHxLxE), strict=True)))


class QuadraticCore(PlainCore):
    """Quadratic attention: f(q kᵀ scale + b) / N · v over the visible pairs (see `ops.quadratic_attention`).

    Grouped-query attention: adjacent heads of queries may share a head of keys and values, which the KV cache holds
    once.
    """

    state_grows = True

    def __init__(
        self, config: ModelConfig, options: QuadraticOptions, function: str = "softmax", bias: MakeBias | None = None
    ):
        """A core with the attention function `function`, and optionally a bias."""
        # The attention function, N and the implementation.
        self.function = function
        self.normalizer = normalizer(config.normalizer, config.divides)
        self.implementation, self.kernels = options.implementation, config.kernels
        self.state_dtype = jnp.dtype(config.state_dtype)
        check_request(self.implementation, function, bias is not None)
        self.bias = bias(config.max_length) if bias else None
        self.longest = self.bias.reach if self.bias else None
        self.undecodable = self.normalizer.undecodable if function != "softmax" else None

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        # Implementations of the same attention: a library's for softmax, a kernel for other functions, or XLA's.
        q, k = pairs["attention"]
        if (backend := self._kernel(q, v)) is not None:
            return self._attend_by_kernel(backend, q, k, v, context)
        return self._attend(q, k, v, context.key_span(), q.shape[2], context.structure(), trains=True)

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"attention": True}

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> KeyValueCache:
        """An empty KV cache for `capacity` tokens per sequence."""
        return KeyValueCache.empty(batch, heads, capacity, key_width, value_width, self.state_dtype)

    def prefill(
        self, pairs: Pairs, v: jax.Array, context: Context, state: KeyValueCache
    ) -> tuple[jax.Array, KeyValueCache]:
        """Writes the new keys and values at their positions, then attends to all up to the query."""
        # Write first, so that each token also sees itself.
        q, k = pairs["attention"]
        capacity, key_span = state.key_BxHxMxK.shape[2], context.key_span()
        state = state.append_tokens(k, v, context)

        def attend_to(slots: int) -> jax.Array:
            key_BxHxSxK, value_BxHxSxE = (cache[:, :, :slots] for cache in state)
            return self._attend(q, key_BxHxSxK, value_BxHxSxE, key_span, capacity, None, trains=False)

        # A piece of a long prompt reads only the filled part of the cache, to within an eighth.
        shares = min(8, -(-capacity // _SMALLEST_SHARE)) if q.shape[2] > 1 else 1
        slots = [-(-capacity * (i + 1) // shares) for i in range(shares)]
        filled = jnp.max(jnp.where(context.real(), key_span.stop_BxL, 0))
        out = jax.lax.switch(jnp.searchsorted(jnp.asarray(slots), filled), [partial(attend_to, n) for n in slots])
        return out, state

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Scores and weighted values of the visible pairs."""
        visible = (length + 1) / 2 if causal else length
        return 2 * heads * visible * (key_width + value_width)

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        key_span: KeySpan,
        length: int,
        structure: MaskStructure | None,
        *,
        trains: bool,
    ) -> jax.Array:
        shape, dtype, groups, one_token = q.shape, q.dtype, q.shape[1] // k.shape[1], q.shape[2] == 1
        scale = self.normalizer.scale(q.shape[-1], length, self.function)
        q = q.astype(k.dtype)
        if self.function == "softmax" and not one_token:
            by_library = self._attend_by_library(q, k, v, key_span, structure, scale=scale, trains=trains)
            if by_library is not None:
                return by_library.astype(dtype)
        # Grouped-query attention: repeat the keys, or for a single token fold the group into the queries.
        if one_token:
            # Queries that share a head of keys become several queries of one head, so the cache is read without a copy.
            q = q.reshape(*k.shape[:2], groups, -1)
        elif groups > 1:
            k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
        out = quadratic_attention(
            q,
            k,
            v,
            key_span,
            function=self.function,
            scale=scale,
            divisor_BxL=self.normalizer.over_all(key_span.count(), length),
            bias=self.bias,
            blocked=self.implementation != "plain" and not one_token,
        )
        return out.reshape(*shape[:3], v.shape[-1]).astype(dtype)

    def _attend_by_library(
        self, q, k, v, key_span: KeySpan, structure: MaskStructure | None, *, scale: float, trains: bool
    ) -> jax.Array | None:
        by_xla = "plain" if self.implementation == "plain" else "blocked"
        if self.bias is not None:
            report(PART, f"{by_xla}, since libraries do not take its bias")
            return None
        return softmax_by_library(
            self.implementation, q, k, v, key_span, structure, scale=scale, otherwise=by_xla, trains=trains
        )

    def _kernel(self, q: jax.Array, v: jax.Array) -> str | None:
        if self.function == "softmax":  # not a function of each score: libraries have it, and no kernel of ours
            return None
        # The plain implementation excludes kernels; the reason is part of the message.
        plain = "model.quadratic.implementation=plain" if self.implementation == "plain" else None
        return choose_backend(self.kernels, "quadratic attention", self.function, q.shape[2], q, v, plain)

    def _attend_by_kernel(self, backend: str, q, k, v, context: Context) -> jax.Array:
        # One chunk of the full length: quadratic attention is its local term.
        assert context.segments is not None
        length, key_span = q.shape[2], context.key_span()
        return attend_in_chunks(
            Form(self.function, self.normalizer.scale(q.shape[-1], length, self.function), backend),
            q,
            k,
            v,
            context.segments.runs_BxL,
            key_span,
            chunk_size=length,
            divisor_BxL=self.normalizer.over_all(key_span.count(), length),
            bias_W=None if self.bias is None else self.bias(jnp.arange(1 - length, length, dtype=jnp.int32)),
        )
