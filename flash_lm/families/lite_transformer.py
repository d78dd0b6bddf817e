"""Lite Transformer: long-short range attention, softmax heads beside dynamic convolution (Wu et al. 2020)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm.config.keys import key, one_of, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, head_problems, times, width_problems
from flash_lm.layers.attention import MultiHeadAttention, Projected
from flash_lm.layers.attention_core import Pairs
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import taps_inside
from flash_lm.layers.dense import Dense, Output
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.quadratic_core import QuadraticCore, QuadraticOptions
from flash_lm.layers.sublayer import LayerArray
from flash_lm.ops.dynamic_convolution import continue_dynamic_convolution, dynamic_convolution, softmax_of_taps


def _inside(share: float) -> str | None:
    return None if 0 < share < 1 else "more than 0 and less than 1"


def _kernels(kernels: tuple) -> str | None:
    good = kernels and all(isinstance(taps, int) and taps > 0 for taps in kernels)
    return None if good else "a tuple of positive integers, such as (3, 7, 15, 31)"


@section("model.lite")
class LiteOptions:
    """Options of long-short range attention."""

    attention_share: float = key(
        0.5, "share of the heads, and so of the channels, that attend; the others convolve", _inside
    )
    convolution: str = key(
        "dynamic", "dynamic (each token has its own taps) or light (all have the same)", one_of("dynamic", "light")
    )
    kernels: tuple = key(
        (3, 7, 15, 31), "taps of each layer, from the first; further layers have as many as the last of these", _kernels
    )

    def attending(self, heads: int) -> int:
        """How many of the heads attend, rounded to an integer."""
        return int(self.attention_share * heads + 0.5)


class TokenConvolution(nnx.Module):
    """Dynamic convolution of the array "short" by the taps in the array "taps".

    Attributes:
        kernels: taps of each layer that this is stacked over, for counting FLOPs.
    """

    def __init__(self, config: ModelConfig, width: int, count: int):
        """`count`: of the taps, of which a layer may use fewer."""
        self.width, self.count, self.kernels = width, count, (count,)
        self.state_dtype = jnp.dtype(config.state_dtype or config.dtype)

    def __call__(self, arrays: Mapping[str, jax.Array], context: Context) -> dict[str, jax.Array]:
        """The arrays, with "short" convolved inside documents."""
        assert context.segments is not None
        runs_BxL = context.segments.runs_BxL
        return {
            **arrays,
            "short": dynamic_convolution(arrays["short"], arrays["taps"], runs_BxL, causal=context.causal),
        }

    def init_state(self, batch: int) -> dict[str, jax.Array]:
        """The inputs before the first token."""
        return {"short": jnp.zeros((batch, self.count - 1, self.width), self.state_dtype)}

    def prefill(
        self, arrays: Mapping[str, jax.Array], context: Context, state: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """`__call__` from any position of each sequence; and the last inputs."""
        assert context.lengths_B is not None
        short, last = continue_dynamic_convolution(arrays["short"], arrays["taps"], state["short"], context.lengths_B)
        return {**arrays, "short": short}, {"short": last}

    def flops_per_token(self, length: int, causal: bool) -> float:
        """The taps that read a token of the sequence, on average over the layers."""
        return 2 * self.width * sum(taps_inside(taps, length, causal) for taps in self.kernels) / len(self.kernels)


class LongShortAttention(MultiHeadAttention):
    """Long-short range attention: softmax(q kᵀ / √K) v for some channels, (Σ_i w_ti g_(t+i)) W_o for the others.

    g = x W_v ⊙ σ(x W_g). w is a softmax over the taps of the layer, per head: of a linear map of g_t (dynamic) or of
    numbers that are the same for all tokens (light).
    """

    convolutions: TokenConvolution  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, options: LiteOptions, quadratic: QuadraticOptions, *, rngs: nnx.Rngs):
        """H heads, each with D / H of the channels, of which some attend; these have width K."""
        heads, width = config.num_heads, config.model_dim // config.num_heads
        attending = options.attending(heads)
        # The attention is a MultiHeadAttention over the first channels only.
        attending_config = dataclasses.replace(
            config, num_heads=attending, model_dim=attending * width, short_convolution=0
        )
        super().__init__(attending_config, QuadraticCore(attending_config, quadratic), rngs=rngs)
        self.long_width, short_width = attending_config.model_dim, config.model_dim - attending_config.model_dim
        # The convolution has the remaining heads; a stack of layers shares the largest number of taps.
        self.convolving, self.short_width = heads - attending, short_width
        # Of all layers of the model, from the first.
        self.kernels = tuple(options.kernels[: config.num_layers])
        self.kernels += self.kernels[-1:] * (config.num_layers - len(self.kernels))
        count = max(self.kernels)
        self.convolutions = nnx.data(TokenConvolution(config, short_width, count))  # it was None, which is static
        self.short_value, self.short_gate = (Dense(short_width, short_width, config, rngs=rngs) for _ in range(2))
        self.short_output = Output(short_width, short_width, config, rngs=rngs)
        self.projection_weights += 3 * short_width * short_width
        self.causal = bool(config.causal)
        if options.convolution == "dynamic":
            self.taps = Dense(short_width, self.convolving * count, config, rngs=rngs)
        else:
            zeros_HxW = jnp.zeros((self.convolving, count), jnp.dtype(config.param_dtype))
            self.taps = nnx.Param(zeros_HxW, **VECTORS)
        # That of the first layer, unless a stack says which layers these are.
        self.kernel = LayerArray(self.layer_arrays(np.zeros(1, np.int32))["kernel"][0])

    def layer_arrays(self, numbers_N: np.ndarray) -> dict[str, jax.Array]:
        """Numbers of taps."""
        self.convolutions.kernels = tuple(self.kernels[n] for n in numbers_N)
        return {"kernel": jnp.asarray(self.convolutions.kernels, jnp.int32)}

    def maps(self, x_BxLxD: jax.Array) -> Mapping[str, jax.Array]:
        """Queries, keys and values of the first channels; g of the others, and their taps."""
        # The first channels attend, the others pass a GLU before the convolution.
        long, short = x_BxLxD[..., : self.long_width], x_BxLxD[..., self.long_width :]
        short = self.short_value(short) * jax.nn.sigmoid(self.short_gate(short))
        return {**super().maps(long), "short": short, "taps": self._taps(short)}

    def arrange(self, maps: Mapping[str, jax.Array], context: Context) -> Projected[Pairs]:
        """Queries, keys and values of the attention; the convolved channels pass by as the gate."""
        return super().arrange(maps, context)._replace(gate=maps["short"])

    def finish(self, mixed_BxHxLxE: jax.Array, short_BxLxD: jax.Array) -> jax.Array:
        """Concatenates attention and convolution, each after its output map."""
        long = super().finish(mixed_BxHxLxE, None)
        return jnp.concatenate([long, self.short_output(short_BxLxD)], axis=-1)

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Attention and convolution, counting only the taps that the layer uses."""
        kernels = self.convolutions.kernels if isinstance(self.taps, Dense) else (0,)
        of_taps = 2 * self.short_width * self.convolving * sum(kernels) / len(kernels)
        return super().flops_per_token(length, causal) + of_taps

    def _taps(self, short_BxLxD: jax.Array) -> jax.Array:
        # Dynamic taps are a linear map of the token, lightweight ones the same for all tokens.
        if isinstance(self.taps, Dense):
            scores = self.taps(short_BxLxD)
            scores_BxLxHxW = scores.reshape(*scores.shape[:2], self.convolving, -1)
        else:
            scores_BxLxHxW = self.taps[...][None, None]
        return softmax_of_taps(scores_BxLxHxW, self.kernel[...], causal=self.causal)


def _problems(config: ModelConfig) -> list[str]:
    lite, heads = config[LiteOptions], config.num_heads
    problems = width_problems(config) or head_problems(config)  # the branches share the channels by heads of D / H
    # Both branches need at least one head.
    if not 0 < lite.attending(heads) < heads:
        problems.append(
            f"model.lite.attention_share={lite.attention_share} of model.num_heads={heads} must leave a head or more "
            "to the attention and to the convolution"
        )
    return problems


LONG_SHORT = SublayerSpec(LongShortAttention, (LiteOptions, QuadraticOptions), MULTI_HEAD_KEYS, problems=_problems)
ROWS = {
    "lite_transformer": Family(
        (LONG_SHORT, MLP_SPEC),
        # Half of the channels attend and half convolve, which takes 1.75 D² and leaves the MLP more than 8 D².
        {"absolute_positions": "learned", "mlp_dim": times(41, 8)},
        about="long-short range attention: softmax in half of the heads, dynamic convolution in the others, and an MLP",
        paper="Wu et al. 2020, arXiv:2004.11886",
    )
}
