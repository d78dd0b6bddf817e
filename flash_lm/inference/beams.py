"""Beam search with the length penalty of Wu et al. 2016 (arXiv:1609.08144, equation 14).

The score of an answer is its log-probability divided by ((5 + n) / 6)^α, where n counts its tokens and end-of-text. So
α = 0 ranks by probability alone, and a larger α prefers longer answers.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from flash_lm.models.decode_state import DecodeState

Step = Callable[[jax.Array, DecodeState], tuple[jax.Array, DecodeState]]


class BeamResult(NamedTuple):
    """W answers per prompt, the best first; if fewer exist, the score of the others is −∞.

    Attributes:
        tokens_BxWxT: token ids, end-of-text left out.
        log_probs_BxWxT: log-probabilities of the tokens under the model.
        lengths_BxW: number of tokens.
        scores_BxW: scores, by which they are ranked.
        finished_BxW: which have ended; the others are cut off by the budget.
    """

    tokens_BxWxT: jax.Array
    log_probs_BxWxT: jax.Array
    lengths_BxW: jax.Array
    scores_BxW: jax.Array
    finished_BxW: jax.Array


class _LiveBeams(NamedTuple):
    """Unfinished answers; `total_BxW` is their log-probability, −∞ for those that do not exist."""

    total_BxW: jax.Array
    tokens_BxWxT: jax.Array
    log_probs_BxWxT: jax.Array


_Answers = TypeVar("_Answers", _LiveBeams, BeamResult, jax.Array)


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
) -> BeamResult:
    """Searches from a state after B prompts; for use inside a compiled function.

    End-of-text finishes an answer if it is among the `width` likeliest next tokens of all beams. The search ends when
    no beam can reach a better score than the worst of `width` answers; beams that the budget cuts off are ranked with
    them. A single beam is ranked by probability, so that it is greedy decoding.

    Args:
        step: function (tokens of B·W beams, state before them) -> (next logits, state).
        state: state after the prompts, its layers unstacked.
        logits_BxV: logits of each prompt's next token.
        vacant_B: which batch entries have no prompt.
        never_V: ids that must not be generated.
        end: id of end-of-text.
        budget: largest number of tokens of an answer, at most `size`.
        penalty: α, 0 or more.
        width: W, the number of beams.
        size: T.
    """
    # Every prompt becomes W beams, next to each other in the batch; at the start only the first one is alive.
    batch, vocab = logits_BxV.shape
    repeat_beams = lambda x: jnp.repeat(x, width, axis=0)
    state = DecodeState(repeat_beams(state.positions_B), jax.tree.map(repeat_beams, state.layers), state.capacity)
    first_beam_BxW = (jnp.arange(width) == 0) & ~vacant_B[:, None]  # at the start all beams are the same one
    empty = jnp.full((batch, width, size), end, jnp.int32), jnp.zeros((batch, width, size), jnp.float32)
    live = _LiveBeams(jnp.where(first_beam_BxW, 0.0, -jnp.inf), *empty)
    no_answers = (
        jnp.zeros((batch, width), jnp.int32),
        jnp.full((batch, width), -jnp.inf),
        jnp.zeros((batch, width), bool),
    )
    done = BeamResult(*empty, *no_answers)
    normaliser = lambda tokens: ((5.0 + tokens) / 6.0) ** (penalty if width > 1 else 0.0)

    # A beam's log-probability can only fall, so dividing it by the largest penalty bounds its score.
    def is_unfinished(loop) -> jax.Array:
        position, _, _, live, done = loop
        reachable_B = live.total_BxW[:, 0] / normaliser(budget)
        return (position < budget) & (reachable_B > done.scores_BxW[:, -1]).any()

    def step_token(loop):
        # Log-probabilities of all continuations of all beams of a prompt, of which the best are candidates.
        position, state, logits_RxV, live, done = loop
        log_probs_BxWxV = jax.nn.log_softmax(logits_RxV).reshape(batch, width, vocab)
        total_BxWxV = live.total_BxW[..., None] + jnp.where(never_V, -jnp.inf, log_probs_BxWxV)
        # 2 W candidates: even if every beam ends with one of them, W others are left to continue.
        total_BxC, chosen_BxC = jax.lax.top_k(total_BxWxV.reshape(batch, -1), min(2 * width, width * vocab))
        beam_BxC, token_BxC = chosen_BxC // vocab, chosen_BxC % vocab
        log_prob_BxC = jnp.take_along_axis(log_probs_BxWxV.reshape(batch, -1), chosen_BxC, axis=1)
        ended_BxC, parents = token_BxC == end, _select(live, beam_BxC)
        counts_BxC = ended_BxC & (jnp.arange(ended_BxC.shape[1]) < width)
        ended_answers = BeamResult(
            parents.tokens_BxWxT,
            parents.log_probs_BxWxT,
            jnp.full(token_BxC.shape, position),
            jnp.where(counts_BxC, total_BxC / normaliser(position + 1), -jnp.inf),
            ended_BxC,
        )
        # Candidates that do not end continue as beams: the W best ones.
        continued = _LiveBeams(
            jnp.where(ended_BxC, -jnp.inf, total_BxC),
            parents.tokens_BxWxT.at[..., position].set(token_BxC),
            parents.log_probs_BxWxT.at[..., position].set(log_prob_BxC),
        )
        _, kept_BxW = jax.lax.top_k(continued.total_BxW, width)
        live, done = _select(continued, kept_BxW), _merge_best(done, ended_answers)
        # Each beam continues from the decode state of its parent.
        parent_BxW = jnp.take_along_axis(beam_BxC, kept_BxW, axis=1)
        reorder = lambda x: _select(x.reshape(batch, width, *x.shape[1:]), parent_BxW).reshape(x.shape)
        state = DecodeState(reorder(state.positions_B), jax.tree.map(reorder, state.layers), state.capacity)
        logits_RxV, state = step(jnp.take_along_axis(token_BxC, kept_BxW, axis=1).reshape(-1), state)
        return position + 1, state, logits_RxV, live, done

    position, _, _, live, done = jax.lax.while_loop(
        is_unfinished, step_token, (jnp.int32(0), state, repeat_beams(logits_BxV), live, done)
    )
    lengths_BxW = jnp.full((batch, width), position)
    scores_BxW = live.total_BxW / normaliser(jnp.maximum(position, 1))
    return _merge_best(
        done, BeamResult(live.tokens_BxWxT, live.log_probs_BxWxT, lengths_BxW, scores_BxW, no_answers[-1])
    )


def _select(answers: _Answers, chosen_BxC: jax.Array) -> _Answers:
    """Selects beams of each prompt by index."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, chosen: row[chosen])(x, chosen_BxC), answers)


def _merge_best(one: BeamResult, other: BeamResult) -> BeamResult:
    """The best answers of both results, as many as `one` has; among equal scores those of `one` first."""
    all_answers = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), one, other)
    return _select(all_answers, jax.lax.top_k(all_answers.scores_BxW, one.scores_BxW.shape[1])[1])
