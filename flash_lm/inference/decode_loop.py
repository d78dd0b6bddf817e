"""What is compiled of decoding: functions of the unstacked parameters and of what is carried from token to token."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flash_lm.data.conditioning import Conditioning
from flash_lm.inference import beams
from flash_lm.inference.decode_params import DecodeParams, Unstacked
from flash_lm.inference.decoding import Decoding
from flash_lm.inference.sampling import SamplingArrays, draw_tokens
from flash_lm.models.decode_state import DecodeState
from flash_lm.training.sharding import BATCH


class DecodeLoop:
    """The compiled functions of an `Engine`; each is compiled once for each shape.

    Attributes:
        start: a carry before the first token.
        read: a state with what the encoder makes of sources.
        prefill: a carry after a piece of each prompt.
        score: scores of a piece of each row, and the state after it.
        advance: a carry after new tokens, and the tokens.
        search: the answers of a beam search.
        row_keys: a random key for each row.
        join: a carry in which a row is another one's first.
        leave: a carry in which a row has ended.
        unstack: a carry whose layers are separate arrays.
    """

    def __init__(self, params: DecodeParams, mesh: Mesh, *, end: int, never_V: np.ndarray, conditioning: Conditioning):
        """Compiles nothing; the arguments are those of an `Engine`."""
        self._params, self._mesh = params, mesh
        self._end, self._never_V, self._conditioning = end, never_V, conditioning
        self.start = jax.jit(self._start, static_argnums=(2, 3))
        self.read = jax.jit(self._read, donate_argnums=1)
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.score = jax.jit(self._score, donate_argnums=1, static_argnums=5)
        self.advance = jax.jit(self._advance, donate_argnums=1, static_argnums=5)
        self.search = jax.jit(self._search, static_argnums=(4, 5))
        self.row_keys = jax.jit(_row_keys, static_argnums=1)
        self.join = jax.jit(self._join, donate_argnums=0)
        self.leave = jax.jit(self._leave, donate_argnums=0)
        self.unstack = jax.jit(lambda carry: self._spread(dataclasses.replace(carry, state=carry.state.unstack())))

    def _start(self, params: Unstacked, rows: jax.Array, filled: int, capacity: int) -> Decoding:
        logits_BxV = jnp.zeros((filled, self._params.model.config.vocab_size), jnp.float32)
        state = self._params.bind(params).init_state(filled, capacity)
        seen_BxV = jnp.zeros(logits_BxV.shape, bool)
        finished_B = jnp.arange(filled) >= rows  # padding rows have ended from the start
        count_B = jnp.zeros(filled, jnp.int32)
        return self._spread(Decoding(state, logits_BxV, seen_BxV, count_B, finished_B))

    def _read(self, params: Unstacked, state: DecodeState, source_BxM: jax.Array, lengths_B) -> DecodeState:
        return self._params.bind(params).remember(source_BxM, state, lengths_B)

    def _prefill(self, params: Unstacked, carry: Decoding, inputs_BxL: jax.Array, lengths_B: jax.Array) -> Decoding:
        prefix_B = self._conditioning.prefix_length(lengths_B)  # a whole prompt
        logits_BxV, state = self._params.bind(params).prefill_last(inputs_BxL, carry.state, lengths_B, prefix_B)
        logits_BxV = jnp.where(lengths_B[:, None] > 0, logits_BxV, carry.logits_BxV)
        real_BxL = jnp.arange(inputs_BxL.shape[1])[None] < lengths_B[:, None]
        seen_BxV = jax.vmap(lambda seen, ids, real: seen.at[ids].max(real))(carry.seen_BxV, inputs_BxL, real_BxL)
        return self._spread(dataclasses.replace(carry, state=state, logits_BxV=logits_BxV, seen_BxV=seen_BxV))

    def _score(self, params: Unstacked, state: DecodeState, inputs_BxL, targets_BxL, lengths_B, top: int, prefix_B):
        logits_BxLxV, state = self._params.bind(params).prefill(inputs_BxL, state, lengths_B, prefix_B)
        total_BxLx1 = jax.nn.logsumexp(logits_BxLxV, axis=-1, keepdims=True)
        top_BxLxK, ids_BxLxK = jax.lax.top_k(logits_BxLxV, top)
        is_likeliest_BxL = logits_BxLxV.argmax(axis=-1) == targets_BxL
        return (_log_prob(logits_BxLxV, targets_BxL), is_likeliest_BxL, ids_BxLxK, top_BxLxK - total_BxLx1), state

    def _advance(
        self,
        params: Unstacked,
        carry: Decoding,
        settings: SamplingArrays,
        keys_B: jax.Array,
        budget: jax.Array,
        size: int,
    ):
        bound, blocks, never_V = self._params.bind(params), params.blocks, jnp.asarray(self._never_V)
        rows = carry.finished_B.shape[0]

        def going(loop) -> jax.Array:
            place, carry, _ = loop
            return (place < budget) & ~carry.finished_B.all()

        def one_token(loop):
            place, carry, (tokens_BxT, log_probs_BxT, lengths_B) = loop
            possible_BxV = jnp.where(never_V[None], -jnp.inf, carry.logits_BxV)
            token_keys_B = jax.vmap(jax.random.fold_in)(keys_B, carry.count_B)
            tokens_B = draw_tokens(possible_BxV, carry.seen_BxV, token_keys_B, settings)
            tokens_B = jnp.where(carry.finished_B, self._end, tokens_B)
            finished_B = carry.finished_B | (tokens_B == self._end)
            new = (
                tokens_BxT.at[:, place].set(tokens_B),
                log_probs_BxT.at[:, place].set(_log_prob(carry.logits_BxV, tokens_B)),
                lengths_B + (~finished_B).astype(jnp.int32),
            )
            logits_BxV, state = bound.step_unstacked(tokens_B, carry.state, blocks)
            seen_BxV = carry.seen_BxV.at[jnp.arange(rows), tokens_B].set(True)
            carry = self._spread(Decoding(state, logits_BxV, seen_BxV, carry.count_B + 1, finished_B))
            return place + 1, carry, new

        def due(carry: Decoding) -> jax.Array:
            return jnp.stack([carry.state.positions_B % n == 0 for n in bound.settles_every]).any()

        def until_due(loop):
            """Generates up to the next token after which the state must be settled, then settles it."""

            def one_more(both):
                loop = one_token(both[0])
                return loop, due(loop[1])

            (place, carry, new), _ = jax.lax.while_loop(
                lambda both: going(both[0]) & ~both[1], one_more, (loop, jnp.zeros((), bool))
            )
            state = bound.settle_unstacked(carry.state, blocks)
            return place, self._spread(dataclasses.replace(carry, state=state)), new

        tokens_BxT = jnp.full((rows, size), self._end, jnp.int32)
        new = (tokens_BxT, jnp.zeros((rows, size), jnp.float32), jnp.zeros(rows, jnp.int32))
        body = until_due if bound.settles_every else one_token
        _, carry, new = jax.lax.while_loop(going, body, (jnp.int32(0), carry, new))
        return carry, new

    def _search(self, params: Unstacked, carry: Decoding, budget, penalty, width: int, size: int) -> beams.Found:
        bound = self._params.bind(params)

        def step(tokens_B: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
            logits_BxV, state = bound.step_unstacked(tokens_B, state, params.blocks)
            settle = lambda state: bound.settle_unstacked(state, params.blocks)
            if due := [(state.positions_B % n == 0).any() for n in bound.settles_every]:
                state = jax.lax.cond(jnp.stack(due).any(), settle, lambda x: x, state)
            return logits_BxV, self._spread_state(state)

        never_V = jnp.asarray(self._never_V)
        numbers = {"end": self._end, "budget": budget, "penalty": penalty, "width": width, "size": size}
        return beams.search(step, carry.state, carry.logits_BxV, carry.finished_B, never_V, **numbers)

    def _join(self, carry: Decoding, row: jax.Array, other: Decoding) -> Decoding:
        return self._spread(jax.tree.map(lambda rows, new: rows.at[row].set(new[0]), carry, other))

    def _leave(self, carry: Decoding, row: jax.Array) -> Decoding:
        return dataclasses.replace(carry, finished_B=carry.finished_B.at[row].set(True))

    def _spread(self, carry: Decoding) -> Decoding:
        """Shards the rows over the data and fsdp axes."""
        rows = self._over(*BATCH)
        logits_BxV, seen_BxV = rows(carry.logits_BxV), rows(carry.seen_BxV)
        return Decoding(
            self._spread_state(carry.state), logits_BxV, seen_BxV, rows(carry.count_B), rows(carry.finished_B)
        )

    def _spread_state(self, state: DecodeState) -> DecodeState:
        """As `_spread`; rows are axis 0, or axis 1 in states stacked over layers."""
        rows, is_unstacked = self._over(*BATCH), isinstance(state.layers, list)
        layers = jax.tree.map(rows if is_unstacked else self._over(None, *BATCH), state.layers)
        return dataclasses.replace(state, positions_B=rows(state.positions_B), layers=layers)

    def _over(self, *spec) -> Callable[[jax.Array], jax.Array]:
        def spread(x: jax.Array) -> jax.Array:
            # The compiler decides on the axes after the rows, so that heads may stay sharded over tensor.
            free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(spec))
            return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*spec, *free)))

        return spread


def _row_keys(key: jax.Array, rows: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def _log_prob(logits_xV: jax.Array, ids_x: jax.Array) -> jax.Array:
    chosen_x = jnp.take_along_axis(logits_xV, ids_x[..., None], axis=-1)[..., 0]
    return chosen_x - jax.nn.logsumexp(logits_xV, axis=-1)
