"""Flowformer: linear attention with flow conservation, competition and allocation (Wu et al. 2022)."""

import jax
from flax import nnx

from flash_lm.config.keys import above, key, section
from flash_lm.config.model import ModelConfig
from flash_lm.families.family import Family
from flash_lm.families.feed_forward import MLP_SPEC
from flash_lm.families.sublayer_spec import MULTI_HEAD_KEYS, SublayerSpec, head_problems
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.attention_core import Pairs, PlainCore
from flash_lm.layers.context import Context
from flash_lm.layers.convolution import ConvolutionOptions
from flash_lm.layers.linear_core import LinearOptions, sums_flops
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.flow_attention import FlowState, flow_attention, no_flows, prefill_flow


@section("model.flow")
class FlowOptions:
    """Options of flow attention."""

    clamp: float = key(1.0, "a source's conserved outgoing flow counts no more than this in the competition", above(0))


class FlowCore(PlainCore):
    """Flow attention: σ(Î) ⊙ φ(q)/I · Σ φ(k) (softmax(Ô) n v), φ = σ (see `ops.flow_attention`)."""

    def __init__(self, config: ModelConfig, options: FlowOptions, linear: LinearOptions):
        """A core without parameters."""
        del config
        self.clamp, self.chunk_size = options.clamp, linear.chunk_size

    def __call__(self, pairs: Pairs, v: jax.Array, context: Context) -> jax.Array:
        """B×H×L×E."""
        assert context.segments is not None
        return flow_attention(
            *pairs["attention"],
            v,
            context.segments,
            chunk_size=self.chunk_size,
            clamp=self.clamp,
            causal=context.causal,
            packed=context.packed,
        )

    @property
    def pair_scaling(self) -> dict[str, bool]:
        """One pair, whose scores are not divided by √K."""
        return {"attention": False}

    def init_state(self, batch: int, heads: int, key_width: int, value_width: int, capacity: int) -> FlowState:
        """The state over no tokens; `capacity` is not used."""
        return no_flows(batch, heads, key_width, value_width)

    def prefill(self, pairs: Pairs, v: jax.Array, context: Context, state: FlowState) -> tuple[jax.Array, FlowState]:
        """In chunks, starting from any position: the sums need no chunk grid."""
        # The state has the running sums of the conserved flows.
        return prefill_flow(
            *pairs["attention"],
            v,
            state,
            context.positions_BxL,
            context.real(),
            chunk_size=self.chunk_size,
            clamp=self.clamp,
        )

    step = prefill

    def flops_per_token(self, length: int, causal: bool, heads: int, key_width: int, value_width: int) -> float:
        """Four inner products of features with sums, and linear attention without a denominator."""
        flows = 2 * heads * 4 * key_width
        return flows + sums_flops(length, causal, self.chunk_size, heads, key_width, value_width)


def _attention(
    config: ModelConfig, flow: FlowOptions, linear: LinearOptions, convolution: ConvolutionOptions, *, rngs: nnx.Rngs
) -> Sublayer:
    return MultiHeadAttention(config, FlowCore(config, flow, linear), convolution, rngs=rngs)


FLOW = SublayerSpec(
    _attention, (FlowOptions, LinearOptions, ConvolutionOptions), MULTI_HEAD_KEYS, problems=head_problems
)
ROWS = {
    "flowformer": Family(
        (FLOW, MLP_SPEC),
        {"absolute_positions": "learned"},
        about="linear attention with flow conservation (competition and allocation), and an MLP",
        paper="Wu et al. 2022, arXiv:2202.06258",
    )
}
