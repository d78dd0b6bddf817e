"""sigmoid_window.py: attention to a window, with sigmoids as weights (Ramapuram et al. 2024, arXiv:2409.04431)."""

import math

import jax
import jax.numpy as jnp

from flash_lm.extend import (
    MLP_SPEC,
    Family,
    MultiHeadAttention,
    SublayerSpec,
    UndecodableCore,
    at_least,
    key,
    register_family,
    section,
)


@section("model.sigmoid_window")
class WindowOptions:
    reach: int = key(64, "visible tokens including the query; bidirectional: on each side", at_least(1))


class SigmoidWindowCore(UndecodableCore):
    """σ(q kᵀ / √K − log reach) v over the tokens in reach: the weights need not sum to one."""

    def __init__(self, reach):
        self.reach = reach

    @property
    def pair_scaling(self):
        return {"attention": True}  # the one pair of queries and keys that it takes; its scores are divided by √K

    def __call__(self, pairs, v_BxHxLxE, context):
        q, k = pairs["attention"]
        scores = jnp.einsum("bhlk,bhmk->bhlm", q, k) / math.sqrt(q.shape[-1]) - math.log(self.reach)
        # Causal or bidirectional, within the document, no padding.
        visible = context.key_span(self.reach).visible(jnp.arange(k.shape[2]))
        weights = jnp.where(visible[:, None], jax.nn.sigmoid(scores), 0)
        return jnp.einsum("bhlm,bhme->bhle", weights, v_BxHxLxE)

    def flops_per_token(self, length, causal, heads, key_width, value_width):
        seen = min(self.reach if causal else 2 * self.reach - 1, length)
        return 2 * heads * seen * (key_width + value_width)


def attention(config, options, *, rngs):
    return MultiHeadAttention(config, SigmoidWindowCore(options.reach), rngs=rngs)


# Queries and keys may be rotated, as `model.rotary` says; there are no other positions.
SPEC = SublayerSpec(attention, sections=(WindowOptions,), keys=frozenset({"num_heads", "rotary"}))
register_family("sigmoid_window", Family((SPEC, MLP_SPEC), {"rotary": True, "absolute_positions": "none"}))
