"""What the decode loop carries from token to token, and what it returns."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from flash_lm.models.decode_state import DecodeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """What the loop carries from token to token; donated.

    Attributes:
        state: the model's state after all tokens so far.
        logits_BxV: the next token's logits.
        seen_BxV: which tokens have occurred in the row.
        count_B: number of tokens generated so far.
        finished_B: which rows have ended.
    """

    state: DecodeState
    logits_BxV: jax.Array
    seen_BxV: jax.Array
    count_B: jax.Array
    finished_B: jax.Array


@dataclasses.dataclass(frozen=True)
class Tokens:
    """New tokens: row b has lengths_B[b] of them, end-of-text left out.

    Attributes:
        tokens_BxT: token ids.
        log_probs_BxT: log-probabilities of the tokens under the model, before temperature and filters.
        lengths_B: number of tokens.
        finished_B: which rows have reached end-of-text.
    """

    tokens_BxT: np.ndarray
    log_probs_BxT: np.ndarray
    lengths_B: np.ndarray
    finished_B: np.ndarray


class Hypothesis(NamedTuple):
    """An answer that a beam search found.

    Attributes:
        tokens: token ids, end-of-text left out.
        log_probs: their log-probabilities under the model.
        score: what it is ranked by, see `inference.beams`.
        finished: whether it ends; otherwise it is cut.
    """

    tokens: list[int]
    log_probs: list[float]
    score: float
    finished: bool


class Scored(NamedTuple):
    """The tokens of a given text under the model.

    Attributes:
        log_probs: of each of the T tokens, in nats.
        likeliest: whether each is the likeliest token at its place.
        top_ids_TxK: the K likeliest tokens at each place, the likeliest first; K may be 0.
        top_log_probs_TxK: theirs.
    """

    log_probs: np.ndarray
    likeliest: np.ndarray
    top_ids_TxK: np.ndarray
    top_log_probs_TxK: np.ndarray
