"""The carry of the decode loop, and its results."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from flash_lm.models.decode_state import DecodeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeCarry:
    """The carry of the decode loop. Calls that take it donate it: its buffers are reused, so use only the one returned.

    Attributes:
        state: the decode state after all tokens so far.
        logits_BxV: logits of the next token.
        seen_BxV: which tokens have occurred in the sequence.
        count_B: number of tokens generated so far.
        finished_B: which sequences have ended.
    """

    state: DecodeState
    logits_BxV: jax.Array
    seen_BxV: jax.Array
    count_B: jax.Array
    finished_B: jax.Array


@dataclasses.dataclass(frozen=True)
class Tokens:
    """New tokens: sequence b has lengths_B[b] of them, end-of-text left out.

    Attributes:
        tokens_BxT: token ids.
        log_probs_BxT: log-probabilities of the tokens under the model, before temperature and filters.
        lengths_B: number of tokens.
        finished_B: which sequences have reached end-of-text.
    """

    tokens_BxT: np.ndarray
    log_probs_BxT: np.ndarray
    lengths_B: np.ndarray
    finished_B: np.ndarray


class Hypothesis(NamedTuple):
    """An answer of a beam search.

    Attributes:
        tokens: token ids, end-of-text left out.
        log_probs: log-probabilities of the tokens under the model.
        score: the score by which answers are ranked, see `inference.beams`.
        finished: whether it ends in end-of-text; otherwise it is cut off.
    """

    tokens: list[int]
    log_probs: list[float]
    score: float
    finished: bool


class Scored(NamedTuple):
    """Scores of the T tokens of a text.

    Attributes:
        log_probs: log-probability of each token, in nats.
        likeliest: whether each token is the likeliest at its position.
        top_ids_TxK: the K likeliest tokens at each position, the likeliest first; K may be 0.
        top_log_probs_TxK: log-probabilities of these.
    """

    log_probs: np.ndarray
    likeliest: np.ndarray
    top_ids_TxK: np.ndarray
    top_log_probs_TxK: np.ndarray
