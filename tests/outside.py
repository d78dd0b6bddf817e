"""Rows from outside of the package, as a user's module brings them: a family and an optimizer with their own keys."""

import jax
import jax.numpy as jnp
import optax

from flash_lm import register_family, register_optimizer
from flash_lm.layers.attention import MultiHeadAttention
from flash_lm.layers.linear_core import LinearCore, LinearOptions
from flash_lm.models.families import MLP_PART
from flash_lm.models.family import Family, Part
from flash_lm.schema import above, key, section
from flash_lm.training.optimizer import Optimizer


@section("model.powers")
class PowerOptions:
    power: int = key(2, "of the features", above(0))


@section("train.signs")
class SignOptions:
    share: float = key(0.5, "of the step that is the gradient's sign", above(0))


def power_attention(config, powers, linear, *, rngs):
    features = lambda x: jnp.maximum(x, 0) ** powers.power + 1e-3
    return MultiHeadAttention(LinearCore(features, linear, config), config, rngs=rngs)


def mixed_signs(config, matrix, options):
    mix = lambda g: options.share * jnp.sign(g) + (1 - options.share) * g
    return [
        optax.stateless(lambda updates, params: jax.tree.map(mix, updates)),
        optax.add_decayed_weights(config.weight_decay, mask=matrix),
    ]


POWERS = Part(power_attention, (PowerOptions, LinearOptions), frozenset({"num_heads", "rotary"}))
register_family("powers", Family((POWERS, MLP_PART), {"absolute_positions": "learned"}))
register_optimizer("signs", Optimizer(mixed_signs, (SignOptions,)))
