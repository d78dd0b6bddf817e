"""Samples the next token from its logits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.inference.settings import COLDEST, Sampling, drawn_seed
from flash_lm.runs.hosts import of_all_hosts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """`Sampling` as arguments of a compiled function, which is compiled once without filters and once with filters.

    Each setting is a scalar for all rows, or has one value per row.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    filters: bool = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(sampling: Sampling) -> "SamplingArrays":
        """Settings shared by all rows, as scalars."""
        return SamplingArrays._from(dataclasses.asdict(sampling), sampling.filters)

    @staticmethod
    def of_rows(samplings: Sequence[Sampling]) -> "SamplingArrays":
        """Settings per row."""
        each = [dataclasses.asdict(sampling) for sampling in samplings]
        values = {name: [row[name] for row in each] for name in each[0]}
        return SamplingArrays._from(values, any(sampling.filters for sampling in samplings))

    @staticmethod
    def _from(values: dict[str, Any], filters: bool) -> "SamplingArrays":
        arrays = {x: np.asarray(y, np.int32 if x == "top_k" else np.float32) for x, y in values.items()}
        return SamplingArrays(**jax.device_put(arrays), filters=filters)


def random_key(seed: int) -> jax.Array:
    """The key of a seed of 64 bits; below 2³² it is `jax.random.key`, which reads no further bits."""
    key, high = jax.random.key(seed & 0xFFFF_FFFF), seed >> 32 & 0xFFFF_FFFF
    return jax.random.fold_in(key, high) if high else key


def chosen_seed(seed: int) -> int:
    """As `drawn_seed`, and the same on all hosts; every host calls it."""
    return of_all_hosts(drawn_seed(seed))[0]


def draw_tokens(logits_BxV: jax.Array, seen_BxV: jax.Array, keys_B: jax.Array, settings: SamplingArrays) -> jax.Array:
    """Draws one token per row.

    Args:
        logits_BxV: float32; −∞ for tokens that must not be drawn.
        seen_BxV: which tokens have occurred in the row.
        keys_B: one random key per row.
        settings: for all rows, or per row.

    Returns:
        (B,) int32.
    """
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x, keys_B.shape)[:, None], settings)
    penalty = settings.repetition_penalty
    repeated_BxV = jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty)
    logits_BxV = jnp.where(seen_BxV, repeated_BxV, logits_BxV)

    likeliest_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled_BxV = logits_BxV / jnp.maximum(settings.temperature, COLDEST)
        if settings.filters:
            scaled_BxV = jnp.where(_kept(scaled_BxV, settings), scaled_BxV, -jnp.inf)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BxV).astype(jnp.int32)
        return jnp.where(settings.temperature[:, 0] == 0, likeliest_B, drawn_B)

    # Random numbers for a whole vocabulary cost as much as some layers.
    return jax.lax.cond((settings.temperature == 0).all(), lambda: likeliest_B, draw)


def _kept(logits_BxV: jax.Array, settings: SamplingArrays) -> jax.Array:
    """B×V: the tokens that no filter removes; the most likely always stays. Each filter sees what the last one left.

    The settings are B×1.
    """
    order_BxV = jnp.argsort(-logits_BxV, axis=-1)
    sorted_BxV = jnp.take_along_axis(logits_BxV, order_BxV, axis=-1)
    rank_1xV = jnp.arange(sorted_BxV.shape[1])[None]
    kept_BxV = (rank_1xV < settings.top_k) | (settings.top_k == 0)
    probability_BxV = jax.nn.softmax(jnp.where(kept_BxV, sorted_BxV, -jnp.inf), axis=-1)
    before_BxV = jnp.cumsum(probability_BxV, axis=-1) - probability_BxV
    kept_BxV &= (before_BxV < settings.top_p) | (settings.top_p >= 1)
    kept_BxV &= probability_BxV >= settings.min_p * probability_BxV[:, :1]
    return jax.vmap(lambda order, kept: jnp.zeros_like(kept).at[order].set(kept))(order_BxV, kept_BxV)
