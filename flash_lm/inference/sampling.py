"""Samples the next token from its logits, with temperature, top-k, top-p, min-p and repetition penalty."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.inference.settings import MIN_TEMPERATURE, Sampling, draw_seed
from flash_lm.runs.hosts import gather_from_hosts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """`Sampling` as arguments of a compiled function, which is compiled once without filters and once with filters.

    Each setting is a scalar for all sequences, or has one value per sequence.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    filters: bool = dataclasses.field(metadata={"static": True})

    @staticmethod
    def from_sampling(sampling: Sampling) -> "SamplingArrays":
        """Settings shared by all sequences, as scalars."""
        return SamplingArrays._from_values(dataclasses.asdict(sampling), sampling.filters)

    @staticmethod
    def from_samplings(samplings: Sequence[Sampling]) -> "SamplingArrays":
        """Settings per sequence."""
        each = [dataclasses.asdict(sampling) for sampling in samplings]
        values = {name: [row[name] for row in each] for name in each[0]}
        return SamplingArrays._from_values(values, any(sampling.filters for sampling in samplings))

    @staticmethod
    def _from_values(values: dict[str, Any], filters: bool) -> "SamplingArrays":
        arrays = {x: np.asarray(y, np.int32 if x == "top_k" else np.float32) for x, y in values.items()}
        return SamplingArrays(**jax.device_put(arrays), filters=filters)


def random_key(seed: int) -> jax.Array:
    """The key of a seed of 64 bits; below 2³² it is `jax.random.key`, which reads no further bits."""
    key, high = jax.random.key(seed & 0xFFFF_FFFF), seed >> 32 & 0xFFFF_FFFF
    return jax.random.fold_in(key, high) if high else key


def resolve_seed(seed: int) -> int:
    """`draw_seed` with the same result on all hosts; every host calls it."""
    return gather_from_hosts(draw_seed(seed))[0]


def draw_tokens(logits_BxV: jax.Array, seen_BxV: jax.Array, keys_B: jax.Array, settings: SamplingArrays) -> jax.Array:
    """Draws one token per sequence.

    Args:
        logits_BxV: float32; −∞ for tokens that must not be drawn.
        seen_BxV: which tokens have occurred in the sequence.
        keys_B: one random key per sequence.
        settings: sampling settings, for all sequences or per sequence.

    Returns:
        (B,) int32.
    """
    # The repetition penalty comes first, so that it also changes the greedy token.
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x, keys_B.shape)[:, None], settings)
    penalty = settings.repetition_penalty
    repeated_BxV = jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty)
    logits_BxV = jnp.where(seen_BxV, repeated_BxV, logits_BxV)

    likeliest_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        # Temperature, then the filters on the scaled distribution.
        scaled_BxV = logits_BxV / jnp.maximum(settings.temperature, MIN_TEMPERATURE)
        if settings.filters:
            scaled_BxV = jnp.where(_filter_mask(scaled_BxV, settings), scaled_BxV, -jnp.inf)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BxV).astype(jnp.int32)
        return jnp.where(settings.temperature[:, 0] == 0, likeliest_B, drawn_B)

    # Random numbers for a full vocabulary cost as much as some layers, so greedy decoding draws none.
    return jax.lax.cond((settings.temperature == 0).all(), lambda: likeliest_B, draw)


def _filter_mask(logits_BxV: jax.Array, settings: SamplingArrays) -> jax.Array:
    """The tokens that no filter removes, B×V bool; the most likely one always stays.

    Each filter is applied to the tokens that the last one has left. The settings are B×1.
    """
    # Top-k by rank.
    order_BxV = jnp.argsort(-logits_BxV, axis=-1)
    sorted_BxV = jnp.take_along_axis(logits_BxV, order_BxV, axis=-1)
    rank_1xV = jnp.arange(sorted_BxV.shape[1])[None]
    kept_BxV = (rank_1xV < settings.top_k) | (settings.top_k == 0)
    # Top-p by the probability of all likelier tokens, and min-p relative to the likeliest one.
    probability_BxV = jax.nn.softmax(jnp.where(kept_BxV, sorted_BxV, -jnp.inf), axis=-1)
    before_BxV = jnp.cumsum(probability_BxV, axis=-1) - probability_BxV
    kept_BxV &= (before_BxV < settings.top_p) | (settings.top_p >= 1)
    kept_BxV &= probability_BxV >= settings.min_p * probability_BxV[:, :1]
    # Back from the sorted order to that of the vocabulary.
    return jax.vmap(lambda order, kept: jnp.zeros_like(kept).at[order].set(kept))(order_BxV, kept_BxV)
