"""The compiled functions of decoding: prefill, scoring, the loop over new tokens, and beam search."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flash_lm.data.conditioning import Conditioning
from flash_lm.inference import beams
from flash_lm.inference.decode_params import DecodeParams, Unstacked
from flash_lm.inference.decoding import DecodeCarry
from flash_lm.inference.sampling import SamplingArrays, draw_tokens
from flash_lm.models.decode_state import DecodeState
from flash_lm.training.sharding import BATCH


class DecodeLoop:
    """The compiled functions of an `Engine`; each is compiled once per shape. A carry is a `DecodeCarry`.

    Attributes:
        start: the carry before the first token.
        encode_source: the state with the keys and values of encoded sources.
        prefill: the carry after a piece of each prompt.
        score: scores of a piece of each sequence, and the state after it.
        advance: the carry after new tokens, and the tokens.
        search: the answers of a beam search.
        row_keys: a random key per sequence.
        join: a carry in which one sequence is replaced by the first of another carry.
        leave: a carry in which one sequence has ended.
        unstack: a carry with separate arrays for each layer.
    """

    def __init__(self, params: DecodeParams, mesh: Mesh, *, end: int, never_V: np.ndarray, conditioning: Conditioning):
        """Compiles nothing; the arguments are those of an `Engine`."""
        # Carries and states are donated if the result has the same shapes: they are large.
        self._params, self._mesh = params, mesh
        self._end, self._never_V, self._conditioning = end, never_V, conditioning
        self.start = jax.jit(self._start, static_argnums=(2, 3))
        self.encode_source = jax.jit(self._encode_source, donate_argnums=1)
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.score = jax.jit(self._score, donate_argnums=1, static_argnums=5)
        self.advance = jax.jit(self._advance, donate_argnums=1, static_argnums=5)
        self.search = jax.jit(self._search, static_argnums=(4, 5))
        self.row_keys = jax.jit(_row_keys, static_argnums=1)
        self.join = jax.jit(self._join, donate_argnums=0)
        self.leave = jax.jit(self._leave, donate_argnums=0)
        self.unstack = jax.jit(lambda carry: self._shard(dataclasses.replace(carry, state=carry.state.unstack())))

    def _start(self, params: Unstacked, rows: jax.Array, padded_rows: int, capacity: int) -> DecodeCarry:
        logits_BxV = jnp.zeros((padded_rows, self._params.model.config.vocab_size), jnp.float32)
        state = self._params.bind(params).init_state(padded_rows, capacity)
        seen_BxV = jnp.zeros(logits_BxV.shape, bool)
        finished_B = jnp.arange(padded_rows) >= rows  # the padding of the batch has ended from the start
        count_B = jnp.zeros(padded_rows, jnp.int32)
        return self._shard(DecodeCarry(state, logits_BxV, seen_BxV, count_B, finished_B))

    def _encode_source(self, params: Unstacked, state: DecodeState, source_BxM: jax.Array, lengths_B) -> DecodeState:
        return self._params.bind(params).encode_source(source_BxM, state, lengths_B)

    def _prefill(
        self, params: Unstacked, carry: DecodeCarry, inputs_BxL: jax.Array, lengths_B: jax.Array
    ) -> DecodeCarry:
        prefix_B = self._conditioning.prefix_length(lengths_B)  # the piece is a full prompt
        logits_BxV, state = self._params.bind(params).prefill_last(inputs_BxL, carry.state, lengths_B, prefix_B)
        logits_BxV = jnp.where(lengths_B[:, None] > 0, logits_BxV, carry.logits_BxV)
        # Tokens of the prompt count for the repetition penalty.
        real_BxL = jnp.arange(inputs_BxL.shape[1])[None] < lengths_B[:, None]
        seen_BxV = jax.vmap(lambda seen, ids, real: seen.at[ids].max(real))(carry.seen_BxV, inputs_BxL, real_BxL)
        return self._shard(dataclasses.replace(carry, state=state, logits_BxV=logits_BxV, seen_BxV=seen_BxV))

    def _score(self, params: Unstacked, state: DecodeState, inputs_BxL, targets_BxL, lengths_B, top: int, prefix_B):
        logits_BxLxV, state = self._params.bind(params).prefill(inputs_BxL, state, lengths_B, prefix_B)
        # log p = logit − logsumexp, of the target and of the likeliest tokens.
        total_BxLx1 = jax.nn.logsumexp(logits_BxLxV, axis=-1, keepdims=True)
        top_BxLxK, ids_BxLxK = jax.lax.top_k(logits_BxLxV, top)
        is_likeliest_BxL = logits_BxLxV.argmax(axis=-1) == targets_BxL
        return (_log_prob(logits_BxLxV, targets_BxL), is_likeliest_BxL, ids_BxLxK, top_BxLxK - total_BxLx1), state

    def _advance(
        self,
        params: Unstacked,
        carry: DecodeCarry,
        settings: SamplingArrays,
        keys_B: jax.Array,
        budget: jax.Array,
        size: int,
    ):
        """Generates up to `budget` tokens per sequence into arrays of `size` columns; stops when all have ended."""
        bound, blocks, never_V = self._params.bind(params), params.blocks, jnp.asarray(self._never_V)
        rows = carry.finished_B.shape[0]

        def is_unfinished(loop) -> jax.Array:
            index, carry, _ = loop
            return (index < budget) & ~carry.finished_B.all()

        def generate_token(loop):
            index, carry, (tokens_BxT, log_probs_BxT, lengths_B) = loop
            # Draw a token per sequence; the key depends on its number, so that calls may be split anywhere.
            possible_BxV = jnp.where(never_V[None], -jnp.inf, carry.logits_BxV)
            token_keys_B = jax.vmap(jax.random.fold_in)(keys_B, carry.count_B)
            tokens_B = draw_tokens(possible_BxV, carry.seen_BxV, token_keys_B, settings)
            tokens_B = jnp.where(carry.finished_B, self._end, tokens_B)
            finished_B = carry.finished_B | (tokens_B == self._end)
            output = (
                tokens_BxT.at[:, index].set(tokens_B),
                log_probs_BxT.at[:, index].set(_log_prob(carry.logits_BxV, tokens_B)),
                lengths_B + (~finished_B).astype(jnp.int32),
            )
            # Compute the logits of the next one.
            logits_BxV, state = bound.step_unstacked(tokens_B, carry.state, blocks)
            seen_BxV = carry.seen_BxV.at[jnp.arange(rows), tokens_B].set(True)
            carry = self._shard(DecodeCarry(state, logits_BxV, seen_BxV, carry.count_B + 1, finished_B))
            return index + 1, carry, output

        # Settling is rare and copies arrays, so it is outside of the loop over tokens, which ends when it is due.
        def due(carry: DecodeCarry) -> jax.Array:
            return jnp.stack([carry.state.positions_B % n == 0 for n in bound.flush_every]).any()

        def generate_until_due(loop):
            """Generates tokens until the state must be flushed, then flushes it."""

            def generate_one(loop_and_due):
                loop = generate_token(loop_and_due[0])
                return loop, due(loop[1])

            (index, carry, output), _ = jax.lax.while_loop(
                lambda loop_and_due: is_unfinished(loop_and_due[0]) & ~loop_and_due[1],
                generate_one,
                (loop, jnp.zeros((), bool)),
            )
            state = bound.flush_unstacked(carry.state, blocks)
            return index, self._shard(dataclasses.replace(carry, state=state)), output

        # Sequences that have ended are filled up with end-of-text.
        tokens_BxT = jnp.full((rows, size), self._end, jnp.int32)
        output = (tokens_BxT, jnp.zeros((rows, size), jnp.float32), jnp.zeros(rows, jnp.int32))
        body = generate_until_due if bound.flush_every else generate_token
        _, carry, output = jax.lax.while_loop(is_unfinished, body, (jnp.int32(0), carry, output))
        return carry, output

    def _search(
        self, params: Unstacked, carry: DecodeCarry, budget, penalty, width: int, size: int
    ) -> beams.BeamResult:
        """Beam search from a carry, with the step of the unstacked model."""
        # The state is flushed inside the step, in a branch that copies it only when it is due.
        bound = self._params.bind(params)

        def step(tokens_B: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
            logits_BxV, state = bound.step_unstacked(tokens_B, state, params.blocks)
            flush = lambda state: bound.flush_unstacked(state, params.blocks)
            if due := [(state.positions_B % n == 0).any() for n in bound.flush_every]:
                state = jax.lax.cond(jnp.stack(due).any(), flush, lambda x: x, state)
            return logits_BxV, self._shard_state(state)

        never_V = jnp.asarray(self._never_V)
        numbers = {"end": self._end, "budget": budget, "penalty": penalty, "width": width, "size": size}
        return beams.search(step, carry.state, carry.logits_BxV, carry.finished_B, never_V, **numbers)

    def _join(self, carry: DecodeCarry, row: jax.Array, other: DecodeCarry) -> DecodeCarry:
        return self._shard(jax.tree.map(lambda rows, new: rows.at[row].set(new[0]), carry, other))

    def _leave(self, carry: DecodeCarry, row: jax.Array) -> DecodeCarry:
        return dataclasses.replace(carry, finished_B=carry.finished_B.at[row].set(True))

    def _shard(self, carry: DecodeCarry) -> DecodeCarry:
        """Shards the batch over the data and fsdp axes."""
        rows = self._constrain(*BATCH)
        logits_BxV, seen_BxV = rows(carry.logits_BxV), rows(carry.seen_BxV)
        return DecodeCarry(
            self._shard_state(carry.state), logits_BxV, seen_BxV, rows(carry.count_B), rows(carry.finished_B)
        )

    def _shard_state(self, state: DecodeState) -> DecodeState:
        """Shards a state like `_shard`; the batch is axis 0, or axis 1 in states stacked over layers."""
        rows, is_unstacked = self._constrain(*BATCH), isinstance(state.layers, list)
        layers = jax.tree.map(rows if is_unstacked else self._constrain(None, *BATCH), state.layers)
        return dataclasses.replace(state, positions_B=rows(state.positions_B), layers=layers)

    def _constrain(self, *spec) -> Callable[[jax.Array], jax.Array]:
        def constrain(x: jax.Array) -> jax.Array:
            # The compiler decides on the axes after the batch, so that heads may stay sharded over tensor.
            free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(spec))
            return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec(*spec, *free)))

        return constrain


def _row_keys(key: jax.Array, rows: int) -> jax.Array:
    """The key of each sequence, fold_in(key, number)."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(rows))


def _log_prob(logits_xV: jax.Array, ids_x: jax.Array) -> jax.Array:
    """The log-probabilities of tokens."""
    chosen_x = jnp.take_along_axis(logits_xV, ids_x[..., None], axis=-1)[..., 0]
    return chosen_x - jax.nn.logsumexp(logits_xV, axis=-1)
