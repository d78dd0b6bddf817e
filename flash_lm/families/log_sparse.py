"""LogSparse attention: a local window, then keys at distances 1, 2, 4, …; convolutional queries and keys.

"Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on Time Series Forecasting", section 4.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config.keys import at_least, key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pairs, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ShortConvolutions, short_convolutions
from flash_lm.layers.dense import KERNEL_INITS
from flash_lm.layers.quadratic_core import KeyValueCache
from flash_lm.ops.offset_attention import attend_at_offsets, attend_in_cache, log_sparse_offsets


@section("model.log_sparse")
class LogSparseOptions:
    """Options of LogSparse attention."""

    local: int = key(8, "near tokens that are all seen, the query itself included", at_least(1))
    restart: int = key(0, "tokens after which the pattern begins again, further back; 0: never", at_least(0))
    convolution: str = key(
        "depthwise",
        "of the queries and keys, with model.short_convolution taps: depthwise (after a linear map) or full (in its "
        "place)",
        one_of("depthwise", "full"),
    )


class LogSparseCore(PlainCore):
    """LogSparse attention: softmax(q kᵀ / √K) v over keys at fixed offsets from the query."""

    state_grows = True

    def __init__(self, config: ModelConfig, options: LogSparseOptions):
        """A core with this pattern."""
        self.local, self.restart = options.local, options.restart
        self.state_dtype = jnp.dtype(config.state_dtype)

    @property
    def pair_scaling(self) -> Mapping[str, bool]:
        """One pair, whose scores are divided by √K."""
        return {"attention": True}

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        q, k = pairs["attention"]
        offsets = self._offsets(v.shape[2], context.causal)
        return attend_at_offsets(q, k, v, context.key_span(), offsets, scale=1 / math.sqrt(q.shape[-1]))

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> KeyValueCache:
        """An empty KV cache for `capacity` tokens per sequence: any token may be needed again."""
        return KeyValueCache.empty(batch, heads, capacity, key_width, value_width, self.state_dtype)

    def prefill(
        self, pairs: Pairs, v: jax.Array, context: Context, state: KeyValueCache
    ) -> tuple[jax.Array, KeyValueCache]:
        """Writes the new keys and values at their positions, then reads those at the offsets."""
        # Write the new tokens, then gather the keys at the offsets from the cache.
        q, k = pairs["attention"]
        state = state.append_tokens(k, v, context)
        offsets = self._offsets(state.key_BxHxMxK.shape[2], causal=True)
        out = attend_in_cache(q, *state, context.key_span(), offsets, scale=1 / math.sqrt(q.shape[-1]))
        return out.astype(v.dtype), state

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Scores and weighted values of the visible pairs."""
        pairs = sum(length - abs(offset) for offset in self._offsets(length, causal))
        return 2 * heads * pairs / length * (key_width + value_width)

    def _offsets(self, length: int, causal: bool) -> tuple[int, ...]:
        return log_sparse_offsets(length, self.local, self.restart, causal)


class LogSparseAttention(MultiHeadAttention):
    """Multi-head LogSparse attention with convolutional queries and keys (section 4.1)."""

    def __init__(self, config: ModelConfig, options: LogSparseOptions, *, rngs: nnx.Rngs):
        """H heads of width K."""
        super().__init__(config, LogSparseCore(config, options), rngs=rngs)
        names, width = ("query", "key"), config.num_heads * config.head_width
        if options.convolution == "full":  # these are the linear maps
            self.query = self.key = None
            self.projection_weights -= 2 * config.model_dim * width
            self.convolutions = _full_convolutions(names, width, config, rngs=rngs)
        else:
            self.convolutions = short_convolutions(dict.fromkeys(names, width), config)

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, keys and values before the convolutions."""
        mapped = lambda linear: x_BxLxD if linear is None else linear(x_BxLxD)
        return {"query": mapped(self.query), "key": mapped(self.key), "value": self.value(x_BxLxD)}


def _full_convolutions(names: Sequence[str], width: int, config: ModelConfig, *, rngs: nnx.Rngs) -> ShortConvolutions:
    """Filters from all channels to those of all heads, in place of linear maps: W·D×`width` weights for each name."""
    taps, dim = config.short_convolution, config.model_dim

    # Each tap is a map, initialised with the fan-in of all taps.
    def draw_taps() -> nnx.Param:
        kernel = KERNEL_INITS[config.init](rngs.params(), (taps * dim, width), jnp.dtype(config.param_dtype))
        return nnx.Param(kernel.reshape(taps, dim, width))

    return ShortConvolutions({name: draw_taps() for name in names}, config, "none")


def _problems(config: ModelConfig) -> list[str]:
    problems, options = head_problems(config), config[LogSparseOptions]
    # The local window must fit into a segment.
    if 0 < options.restart < options.local:
        problems.append(
            f"model.log_sparse.restart={options.restart} must be 0 or at least model.log_sparse.local={options.local}"
        )
    if options.convolution == "full" and not config.short_convolution:
        problems.append("model.log_sparse.convolution=full needs model.short_convolution, its number of taps")
    if options.convolution == "full" and config.biases != "none":
        problems.append(
            f"model.biases={config.biases} needs linear maps of queries and keys, in whose place "
            "model.log_sparse.convolution=full has filters: set model.biases=none"
        )
    return problems


LOG_SPARSE = SublayerSpec(
    LogSparseAttention,
    (LogSparseOptions,),
    MULTI_HEAD_KEYS,
    defaults={"short_convolution": 3},
    problems=_problems,
)
ROWS = {
    "log_sparse": Family(
        (LOG_SPARSE, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="LogSparse softmax attention, convolutional queries and keys, and an MLP",
        paper="Li et al. 2019, arXiv:1907.00235",
    )
}
