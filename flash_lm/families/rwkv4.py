"""RWKV-4: time mixing and channel mixing with token shift ("RWKV", Peng et al. 2023)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.sublayer_spec import SublayerSpec, times
from flash_lm.layers.attention import AttentionSublayer, Projected, join_heads, split_heads
from flash_lm.layers.attention_core import PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.linear_core import LinearOptions
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.convolution import continue_convolution, convolve
from flash_lm.ops.wkv import Sums, prefill_wkv, wkv

# Of the layer in the middle of the authors' model (RWKV-v4/src/model.py in their repository, RWKV-LM): p and c below.
_TIME_POWERS = {"receptance": (0.25, 0.0), "key": (0.5, 0.0), "value": (0.5, 0.15)}
_CHANNEL_POWERS = {"receptance": (0.5, 0.0), "key": (0.5, 0.0)}


class TokenShift(nnx.Module):
    """Token shift: μ x_t + (1 − μ) x_{t−1}, with a μ per channel and map; zeros before a document."""

    def __init__(self, config: ModelConfig, powers: Mapping[str, tuple[float, float]]):
        """Initial μ: the first channels read the previous token, the last ones the token itself.

        Args:
            config: the model's.
            powers: by the names of the maps, p and c of their first μ = (channel / D)^p + c.
        """
        self.names, self.width = tuple(powers), config.model_dim
        self.state_dtype = jnp.dtype(config.state_dtype or config.dtype)
        # The mixing factors grow over the channels, as in the paper's initialisation.
        fraction_D = jnp.arange(config.model_dim, dtype=jnp.float32) / config.model_dim
        for name, (power, constant) in powers.items():
            share_D = fraction_D**power + constant
            setattr(self, name, nnx.Param(share_D.astype(jnp.dtype(config.param_dtype)), **VECTORS))

    def __call__(self, arrays: Mapping[str, jax.Array], context: Context) -> dict[str, jax.Array]:
        """From the input, named "x", to an array for each map, B×L×D."""
        assert context.segments is not None
        x = arrays["x"]
        return self._interpolate(x, convolve(x, self._shift_taps(x), context.segments.runs_BxL, causal=True))

    def init_state(self, batch: int) -> dict[str, jax.Array]:
        """The input before the first token."""
        return {"x": jnp.zeros((batch, 1, self.width), self.state_dtype)}

    def prefill(
        self, arrays: Mapping[str, jax.Array], context: Context, state: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """`__call__` from any position of each sequence; and the last input."""
        assert context.lengths_B is not None
        x = arrays["x"]
        previous, last = continue_convolution(x, self._shift_taps(x), state["x"], context.lengths_B)
        return self._interpolate(x, previous), {"x": last}

    def flops_per_token(self, length: int, causal: bool) -> float:
        """None: elementwise operations are not counted."""
        return 0.0

    def _shift_taps(self, x: jax.Array) -> jax.Array:
        return jnp.stack([jnp.ones(self.width, x.dtype), jnp.zeros(self.width, x.dtype)])

    def _interpolate(self, x: jax.Array, previous: jax.Array) -> dict[str, jax.Array]:
        share = {name: getattr(self, name)[...].astype(x.dtype)[None, None] for name in self.names}
        return {name: previous + share[name] * (x - previous) for name in self.names}


class WKVCore(PlainCore):
    """WKV: mean of values with weights e^k that decay exponentially per channel (see `ops.wkv`)."""

    def __init__(self, config: ModelConfig, options: LinearOptions):
        """Rates from e^−5 to e^3 per token; the token itself counts about 0.3 times, varying by channel."""
        self.chunk_size, dtype = options.chunk_size, jnp.dtype(config.param_dtype)
        fraction_D = np.arange(config.model_dim) / max(config.model_dim - 1, 1)
        # Initial rates and bonuses follow the authors' code: slow to fast channels, bonuses in a zigzag.
        zigzag_D = (np.arange(config.model_dim) + 1) % 3 - 1
        self.log_rate = nnx.Param(jnp.asarray(-5 + 8 * fraction_D**1.35, dtype), **VECTORS)
        self.bonus = nnx.Param(jnp.asarray(np.log(0.3) + 0.5 * zigzag_D, dtype), **VECTORS)

    def __call__(self, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
        """B×1×L×D."""
        assert context.segments is not None
        runs_BxL = context.segments.runs_BxL
        out = wkv(k[:, 0], v[:, 0], *self._decay(), runs_BxL, chunk_size=self.chunk_size, causal=context.causal)
        return out[:, None]

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> Sums:
        """The state over no tokens, B×D each; `capacity` is not used."""
        return Sums.nothing((batch, value_width))

    def prefill(self, k: jax.Array, v: jax.Array, context: Context, state: Sums) -> tuple[jax.Array, Sums]:
        """Continues each sequence from any position."""
        row = (k[:, 0], v[:, 0], *self._decay(), state, context.real())
        out, state = prefill_wkv(*row, chunk_size=self.chunk_size)
        return out[:, None], state

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """None: elementwise operations are not counted."""
        return 0.0

    def _decay(self) -> tuple[jax.Array, jax.Array]:
        return jnp.exp(self.log_rate[...].astype(jnp.float32)), self.bonus[...].astype(jnp.float32)


class TimeMix(AttentionSublayer[jax.Array]):
    """Time mixing: (σ(R) ⊙ wkv(K, V)) W_o with R, K and V maps after a token shift (eq. 11–17)."""

    convolutions: TokenShift  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, linear: LinearOptions, *, rngs: nnx.Rngs):
        """Width D."""
        dim = config.model_dim
        self.core, self.rotary = WKVCore(config, linear), False
        self.heads = self.key_heads = 1
        self.key_width = self.value_width = dim
        self.projection_weights = 4 * dim * dim
        # Token shift takes the role of short convolutions.
        self.convolutions = TokenShift(config, _TIME_POWERS)
        self.receptance = Dense(dim, dim, config, rngs=rngs)
        self.key = Dense(dim, dim, config, rngs=rngs)
        self.value = Dense(dim, dim, config, rngs=rngs)
        self.output = Output(dim, dim, config, rngs=rngs)

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """The input: the token shift comes before the linear maps."""
        return {"x": x_BxLxD}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[jax.Array]:
        """Keys and values, and the gate σ(R)."""
        k, v = (split_heads(getattr(self, name)(maps[name]), 1) for name in ("key", "value"))
        return Projected(k, v, jax.nn.sigmoid(self.receptance(maps["receptance"])))

    def finish(self, mixed_Bx1xLxD: jax.Array, gate_BxLxD: jax.Array) -> jax.Array:
        """Gates with σ(R)."""
        return self.output(gate_BxLxD * join_heads(mixed_Bx1xLxD))


class ChannelMix(Sublayer):
    """Channel mixing: σ(R) ⊙ (relu(K)² W_v) with R and K maps after a token shift (eq. 18–20)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Width config.mlp_dim."""
        dim, width = config.model_dim, config.mlp_dim
        self.shift = TokenShift(config, _CHANNEL_POWERS)
        self.receptance = Dense(dim, dim, config, rngs=rngs)
        self.up = Dense(dim, width, config, rngs=rngs)
        self.down = Output(width, dim, config, rngs=rngs)
        self.weights = dim * dim + 2 * dim * width

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """Channel mixing of full sequences, B×L×D."""
        return self._mix(self.shift({"x": x_BxLxD}, context))

    def init_state(self, batch_size: int, capacity: int) -> dict[str, jax.Array]:
        """The input before the first token; `capacity` is not used."""
        return self.shift.init_state(batch_size)

    def prefill(
        self, x_BxLxD: jax.Array, context: Context, state: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Any number of tokens per sequence, including none."""
        if x_BxLxD.shape[1] == 0:
            return x_BxLxD, state
        shifted, state = self.shift.prefill({"x": x_BxLxD}, context, state)
        return self._mix(shifted), state

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Three products."""
        return 2 * self.weights

    def _mix(self, shifted: Mapping[str, jax.Array]) -> jax.Array:
        # Squared ReLU feed-forward, gated by the receptance.
        hidden = jnp.square(jax.nn.relu(self.up(shifted["key"])))
        return jax.nn.sigmoid(self.receptance(shifted["receptance"])) * self.down(hidden)


TIME_MIX = SublayerSpec(TimeMix, (LinearOptions,), unread=frozenset({"short_convolution"}))
# A third matrix of D² parameters leaves 7 D² of a layer's 12 to the other two.
CHANNEL_MIX = SublayerSpec(ChannelMix, keys=frozenset({"mlp_dim"}), defaults={"mlp_dim": times(7, 2)})
ROWS = {
    "rwkv4": Family(
        (TIME_MIX, CHANNEL_MIX),
        about="time mixing (exponential decay per channel) and channel mixing, both with token shift",
        paper="Peng et al. 2023, arXiv:2305.13048",
    )
}
