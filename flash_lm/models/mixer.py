"""`Mixer`: a family's token-mixing sublayer as a standalone module, for your Flax model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from flash_lm.config.experiment import parse_model
from flash_lm.config.keys import defaults
from flash_lm.config.model import ModelConfig
from flash_lm.config.registry import FAMILIES
from flash_lm.errors import InputError
from flash_lm.families.family import common_forms, complete
from flash_lm.layers.context import Context, make_context, require_one_document, rows_beyond
from flash_lm.layers.sublayer import Sublayer
from flash_lm.ops.positions import rotary_table

# A mixer has no embedding, so the vocabulary (a config needs at least two words) and absolute positions are not used.
# The number of layers is unknown, so the initial scale of outputs does not depend on it.
_UNUSED_KEYS = {"vocab_size": 2, "absolute_positions": "none", "residual_init": "as_init"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixerState:
    """The decode state of a mixer.

    Attributes:
        positions_B: number of tokens consumed per sequence.
        sublayer: state of the sublayer.
        capacity: static; largest number of tokens if the state grows.
    """

    positions_B: jax.Array
    sublayer: Any
    capacity: int = dataclasses.field(metadata={"static": True})


class Mixer(nnx.Module):
    """A sublayer with the interface of a language model, but on vectors; `flash_lm.build_mixer` makes one by name.

    Norm, residual and dropout are yours to add, unless the sublayer owns its residual (Mega). It computes in the dtype
    of its input.
    """

    def __init__(
        self, sublayer: Sublayer, *, causal: bool, max_length: int, rotary_base: float, separates: bool = True
    ):
        """Wraps a sublayer.

        Args:
            sublayer: a sublayer built with the same three values.
            causal: whether a token sees only tokens up to itself.
            max_length: the default capacity of a state, in tokens.
            rotary_base: base of the rotary angles, if the sublayer has rotary positions.
            separates: whether a sequence may hold several documents.
        """
        self.sublayer, self.separates = sublayer, separates
        self.causal, self.max_length, self.rotary_base = causal, max_length, rotary_base

    def __call__(
        self,
        x_BxLxD: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """The parallel form, for training.

        Args:
            x_BxLxD: the normalised input.
            segment_ids: B×L, 0 = padding, each document one contiguous run; None: one document per sequence.
            positions: B×L, position of each token in its document; None: counted from the document's start.
            dropout_key: key for the sublayer's randomness in training, such as a Performer's new features; None:
                deterministic.

        Returns:
            B×L×D.

        Raises:
            ValueError: sequences are longer than the positions allow; or, outside jit, a sequence has several
                documents, which the sublayer cannot separate. Inside jit it becomes NaN.
        """
        # Positions and documents, and a check where the sublayer takes one document per sequence.
        length = x_BxLxD.shape[1]
        self._check_length(length)
        context = make_context(
            length, segment_ids, positions, causal=self.causal, packed=self.separates, dropout_key=dropout_key
        )
        if not self.separates and segment_ids is not None and context.segments is not None:
            x_BxLxD = require_one_document(x_BxLxD, context.segments)
        return self.sublayer(x_BxLxD, self._add_rotary(context))

    def init_state(self, batch_size: int, capacity: int | None = None) -> MixerState:
        """The decode state before the first token.

        Args:
            batch_size: B.
            capacity: largest number of tokens per sequence, for states that grow. None: max_length.

        Raises:
            ValueError: the mixer is bidirectional, needs the full sequence, or its positions end before `capacity`.
        """
        # The same checks as for a language model, with the names of a mixer's arguments.
        if not self.causal:
            raise InputError("prefill and step need a causal mixer, but this one has causal=False")
        if self.sublayer.undecodable:
            raise InputError(self.sublayer.undecodable)
        capacity = self.max_length if capacity is None else capacity
        self._check_length(capacity)
        return MixerState(jnp.zeros(batch_size, jnp.int32), self.sublayer.init_state(batch_size, capacity), capacity)

    def prefill(
        self, x_BxLxD: jax.Array, state: MixerState, lengths_B: jax.Array | None = None
    ) -> tuple[jax.Array, MixerState]:
        """Consumes tokens in parallel; each sequence may be at any position.

        Args:
            x_BxLxD: inputs, padded on the right.
            state: state before these tokens.
            lengths_B: tokens to consume per sequence, 0 … L; None: all.

        Returns:
            B×L×D, meaningless at padding; and the state after the tokens.

        Raises:
            ValueError: outside jit, a sequence exceeds the capacity. Inside jit its outputs are NaN.
        """
        # Positions count on from the state; sequences that exceed it become NaN.
        if lengths_B is None:
            lengths_B = jnp.full(x_BxLxD.shape[0], x_BxLxD.shape[1], jnp.int32)
        positions_BxL = state.positions_B[:, None] + jnp.arange(x_BxLxD.shape[1], dtype=jnp.int32)[None]
        context = self._add_rotary(Context(positions_BxL=positions_BxL, lengths_B=lengths_B))
        end_B, beyond_B = self._end(state, lengths_B)
        y_BxLxD, after = self.sublayer.prefill(x_BxLxD, context, state.sublayer)
        return jnp.where(beyond_B[:, None, None], jnp.nan, y_BxLxD), MixerState(end_B, after, state.capacity)

    def step(self, x_BxD: jax.Array, state: MixerState) -> tuple[jax.Array, MixerState]:
        """Consumes one token per sequence: B×D and the state after it; raises as `prefill` does."""
        # A step is a prefill of one token, and flushes the state as the decode loop of a model does.
        lengths_B = jnp.ones_like(state.positions_B)
        context = self._add_rotary(Context(positions_BxL=state.positions_B[:, None], lengths_B=lengths_B))
        end_B, beyond_B = self._end(state, lengths_B)
        y_BxD, after = self.sublayer.step(x_BxD, context, state.sublayer)
        if self.sublayer.flush_every is not None:
            after = self.sublayer.flush(after, end_B)
        return jnp.where(beyond_B[:, None], jnp.nan, y_BxD), MixerState(end_B, after, state.capacity)

    def _end(self, state: MixerState, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Number of tokens per sequence afterwards, B, and whether it exceeds the state or the positions, B."""
        end_B = state.positions_B + lengths_B
        grows = self.sublayer.state_grows
        limit = state.capacity if grows else self.sublayer.longest
        return end_B, rows_beyond(end_B, limit, grows, self.sublayer.longest_key)

    def _add_rotary(self, context: Context) -> Context:
        width = self.sublayer.rotary_width
        if width is None:
            return context
        return dataclasses.replace(
            context, rotary={width: rotary_table(context.positions_BxL, width, self.rotary_base)}
        )

    def _check_length(self, length: int) -> None:
        longest = self.sublayer.longest
        if longest is not None and length > longest:
            name = self.sublayer.longest_key.removeprefix("model.")
            raise InputError(
                f"{length} tokens exceed {name}={longest}, where the positions of this mixer end: build it with "
                f"{name}={length}, or shorten the sequences"
            )


def build_mixer(family: str, *, rngs: nnx.Rngs, **keys: Any) -> Mixer:
    """Builds the token-mixing sublayer of a family's layer, the first one if a layer has two.

    >>> mixer = build_mixer("flash", model_dim=64, chunks={"size": 32}, rngs=nnx.Rngs(0))
    >>> mixer(jnp.ones((2, 96, 64))).shape
    (2, 96, 64)

    Args:
        family: a row of the table of families.
        rngs: random numbers for the parameters.
        keys: keys of `config.model`, see docs/keys.md; those of a section as a dict. A bidirectional mixer has
            causal=False, and max_length is then its sequence length.

    Raises:
        InputError: lists every problem of the keys, one per line.
    """
    # The defaults of `config.model`, with the keys that are given; sections are merged key by key.
    values = defaults(ModelConfig).to_dict() | _UNUSED_KEYS
    for name, value in {"family": family, **keys}.items():
        is_section = isinstance(values.get(name), dict)
        if is_section and not isinstance(value, dict):
            raise InputError(f"{name} is a section of keys: give a dict, such as {name}={{{_example(values[name])}}}")
        values[name] = {**values[name], **value} if is_section else value

    # The family's spec builds the sublayer; `separates` says whether it can take packed sequences.
    config = complete(parse_model(ConfigDict(values)))
    row = FAMILIES[family]
    sublayer = row.sublayers[row.mixer](config, rngs=rngs)
    return Mixer(
        sublayer,
        causal=config.causal,
        max_length=config.max_length,
        rotary_base=config.rotary_base,
        separates="packed" in common_forms([family]),
    )


def _example(section: dict[str, Any]) -> str:
    name, value = next(iter(section.items()))
    return f"{name!r}: {value!r}"
