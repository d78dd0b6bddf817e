"""Beam search: the likeliest answers that a model finds, instead of samples.

The score of an answer is its log-probability over ((5 + n) / 6)^α, where n counts its tokens and end-of-text (Wu et al.
2016, equation 14). So α = 0 ranks by probability alone, and a larger one prefers longer answers.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from flash_lm.models.decode_state import DecodeState

Step = Callable[[jax.Array, DecodeState], tuple[jax.Array, DecodeState]]


class Found(NamedTuple):
    """W answers to each prompt, the best first; where fewer exist, the score of the others is −∞.

    Attributes:
        tokens_BxWxT: token ids, end-of-text left out.
        log_probs_BxWxT: their log-probabilities under the model.
        lengths_BxW: how many there are.
        scores_BxW: what they are ranked by.
        finished_BxW: which have ended; the others are cut.
    """

    tokens_BxWxT: jax.Array
    log_probs_BxWxT: jax.Array
    lengths_BxW: jax.Array
    scores_BxW: jax.Array
    finished_BxW: jax.Array


class _Live(NamedTuple):
    """Answers that go on; `total_BxW` is their log-probability, −∞ for those that do not exist."""

    total_BxW: jax.Array
    tokens_BxWxT: jax.Array
    log_probs_BxWxT: jax.Array


_Answers = TypeVar("_Answers", _Live, Found, jax.Array)


def search(
    step: Step,
    state: DecodeState,
    logits_BxV: jax.Array,
    vacant_B: jax.Array,
    never_V: jax.Array,
    *,
    end: int,
    budget: jax.Array,
    penalty: jax.Array,
    width: int,
    size: int,
) -> Found:
    """Searches from a state after B prompts; for use inside a compiled function.

    An end of text counts where it is among the `width` likeliest next tokens of all beams. A search ends when no beam
    can come to a better score than the worst of `width` answers; what the budget cuts is ranked with them. A single
    beam is ranked by probability, so that it is greedy decoding.

    Args:
        step: from one token of each of B·W rows, and the state before it, the next logits and state.
        state: after the prompts, its layers unstacked.
        logits_BxV: each prompt's next token.
        vacant_B: which rows have no prompt.
        never_V: ids that may not be generated.
        end: id of end-of-text.
        budget: most tokens of an answer, at most `size`.
        penalty: α, 0 or more.
        width: W, the number of beams.
        size: T.
    """
    rows, vocab = logits_BxV.shape
    each = lambda x: jnp.repeat(x, width, axis=0)
    state = DecodeState(each(state.positions_B), jax.tree.map(each, state.layers), state.capacity)
    first = (jnp.arange(width) == 0) & ~vacant_B[:, None]  # at the start all beams are the same one
    empty = jnp.full((rows, width, size), end, jnp.int32), jnp.zeros((rows, width, size), jnp.float32)
    live = _Live(jnp.where(first, 0.0, -jnp.inf), *empty)
    nothing = jnp.zeros((rows, width), jnp.int32), jnp.full((rows, width), -jnp.inf), jnp.zeros((rows, width), bool)
    done = Found(*empty, *nothing)
    normaliser = lambda tokens: ((5.0 + tokens) / 6.0) ** (penalty if width > 1 else 0.0)

    def going(loop) -> jax.Array:
        place, _, _, live, done = loop
        reachable_B = live.total_BxW[:, 0] / normaliser(budget)
        return (place < budget) & (reachable_B > done.scores_BxW[:, -1]).any()

    def one_token(loop):
        place, state, logits_RxV, live, done = loop
        log_probs_BxWxV = jax.nn.log_softmax(logits_RxV).reshape(rows, width, vocab)
        total_BxWxV = live.total_BxW[..., None] + jnp.where(never_V, -jnp.inf, log_probs_BxWxV)
        # Twice as many as there are beams: so many are left when each beam has ended with one of them.
        total_BxC, chosen_BxC = jax.lax.top_k(total_BxWxV.reshape(rows, -1), min(2 * width, width * vocab))
        beam_BxC, token_BxC = chosen_BxC // vocab, chosen_BxC % vocab
        log_prob_BxC = jnp.take_along_axis(log_probs_BxWxV.reshape(rows, -1), chosen_BxC, axis=1)
        ended_BxC, before = token_BxC == end, _of(live, beam_BxC)
        counts_BxC = ended_BxC & (jnp.arange(ended_BxC.shape[1]) < width)
        ends = Found(
            before.tokens_BxWxT,
            before.log_probs_BxWxT,
            jnp.full(token_BxC.shape, place),
            jnp.where(counts_BxC, total_BxC / normaliser(place + 1), -jnp.inf),
            ended_BxC,
        )
        written = _Live(
            jnp.where(ended_BxC, -jnp.inf, total_BxC),
            before.tokens_BxWxT.at[..., place].set(token_BxC),
            before.log_probs_BxWxT.at[..., place].set(log_prob_BxC),
        )
        _, kept_BxW = jax.lax.top_k(written.total_BxW, width)
        live, done = _of(written, kept_BxW), _best(done, ends)
        from_BxW = jnp.take_along_axis(beam_BxC, kept_BxW, axis=1)
        of_rows = lambda x: _of(x.reshape(rows, width, *x.shape[1:]), from_BxW).reshape(x.shape)
        state = DecodeState(of_rows(state.positions_B), jax.tree.map(of_rows, state.layers), state.capacity)
        logits_RxV, state = step(jnp.take_along_axis(token_BxC, kept_BxW, axis=1).reshape(-1), state)
        return place + 1, state, logits_RxV, live, done

    place, _, _, live, done = jax.lax.while_loop(going, one_token, (jnp.int32(0), state, each(logits_BxV), live, done))
    lengths_BxW = jnp.full((rows, width), place)
    scores_BxW = live.total_BxW / normaliser(jnp.maximum(place, 1))
    return _best(done, Found(live.tokens_BxWxT, live.log_probs_BxWxT, lengths_BxW, scores_BxW, nothing[-1]))


def _of(answers: _Answers, chosen_BxC: jax.Array) -> _Answers:
    """What these beams of each prompt have."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, chosen: row[chosen])(x, chosen_BxC), answers)


def _best(one: Found, other: Found) -> Found:
    """The best answers of both, as many as `one` has; of equal ones the first."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), one, other)
    return _of(both, jax.lax.top_k(both.scores_BxW, one.scores_BxW.shape[1])[1])
