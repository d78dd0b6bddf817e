"""One layer of the stack: residual sublayers, each behind its norm."""

import jax
import jax.numpy as jnp
from flax import nnx

from flash_lm.config import ModelConfig
from flash_lm.layers.context import Context
from flash_lm.layers.norms import NORMS
from flash_lm.layers.sublayer import State, Sublayer
from flash_lm.models.family import FAMILIES


class Layer(nnx.Module):
    """The family's pattern of sublayers, each x + dropout(sublayer(norm(x)))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds each sublayer of the pattern with a norm of its own."""
        self.dropout = config.dropout
        pattern = FAMILIES[config.family].pattern
        self.names = tuple(f"sublayer_{i}" for i in range(len(pattern)))
        for name, build in zip(self.names, pattern, strict=True):
            setattr(self, f"norm_{name}", NORMS[config.norm](config))
            setattr(self, name, build(config, rngs=rngs))

    @property
    def sublayers(self) -> list[Sublayer]:
        """In the pattern's order."""
        return [getattr(self, name) for name in self.names]

    def __call__(self, x_BxLxD: jax.Array, context: Context) -> jax.Array:
        """The parallel form."""
        for i, (norm, sublayer) in enumerate(self._pairs()):
            key = None if context.dropout_key is None else jax.random.fold_in(context.dropout_key, i)
            x_BxLxD += drop(sublayer(norm(x_BxLxD), context), self.dropout, key)
            x_BxLxD = constrain_residual(x_BxLxD)
        return x_BxLxD

    def init_state(self, batch_size: int, capacity: int) -> tuple[State, ...]:
        """The sublayers' states."""
        return tuple(sublayer.init_state(batch_size, capacity) for sublayer in self.sublayers)

    def decode(self, method: str, x: jax.Array, context: Context, states: tuple[State, ...]):
        """`prefill` of B×L×D or `step` of B×D."""
        after = []
        for (norm, sublayer), state in zip(self._pairs(), states, strict=True):
            y, state = getattr(sublayer, method)(norm(x), context, state)
            x, after = x + y, [*after, state]
        return x, tuple(after)

    def flops_per_token(self, length: int, causal: bool) -> float:
        """Forward model FLOPs of the sublayers."""
        return sum(sublayer.flops_per_token(length, causal) for sublayer in self.sublayers)

    def _pairs(self):
        return [(getattr(self, f"norm_{name}"), getattr(self, name)) for name in self.names]


def drop(x_BxLxD: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Dropout: zeroes a share `rate` of the entries and scales the others up; the identity without a key."""
    if key is None or rate == 0:
        return x_BxLxD
    kept = jax.random.bernoulli(key, 1 - rate, x_BxLxD.shape)
    return jnp.where(kept, x_BxLxD / (1 - rate), 0).astype(x_BxLxD.dtype)


def constrain_residual(x_BxLxD: jax.Array) -> jax.Array:
    """Shards the batch of the residual stream over the mesh's data and fsdp axes, when there is a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x_BxLxD
    return jax.lax.with_sharding_constraint(x_BxLxD, jax.sharding.PartitionSpec(("data", "fsdp"), None, None))
