"""Log-probabilities of the tokens of full texts, for the service: two batch sizes, both compiled at the start."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flash_lm.inference.engine import Engine

_SIZE = 128  # tokens per piece


class TokenScore(NamedTuple):
    """The score of a token after the tokens before it.

    Attributes:
        log_prob: log-probability in nats.
        top: log-probabilities of the likeliest tokens at its position by id, the likeliest first.
    """

    log_prob: float
    top: dict[int, float]


class TokenScorer:
    """Scores a few texts at a time."""

    def __init__(self, engine: Engine, rows: int, capacity: int, top: int):
        """Compiles nothing.

        Args:
            engine: the model's engine.
            rows: largest batch size.
            capacity: largest sequence length.
            top: number of likeliest tokens to return.
        """
        self._engine, self._rows, self._capacity, self._top = engine, rows, capacity, top

    def compile(self) -> None:
        """Compiles both batch sizes."""
        for count in {1, self._rows}:
            self([[0, 0]] * count)

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[list[TokenScore]]:
        """Scores the tokens of each sequence after its first one.

        Args:
            rows: token ids, at least two per sequence.
        """
        # The batch is padded to one of the two sizes.
        count = 1 if len(rows) == 1 else self._rows
        padded = [*rows, *[[0, 0]] * (count - len(rows))]
        arrays = [np.array(row, np.int32) for row in padded]
        # Programs of the running batch must not start in between.
        with self._engine.lock:
            scored = self._engine.score_rows(arrays, self._top, min(_SIZE, self._capacity), self._capacity)

        # Arrays of a sequence become a list of scores per token.
        scores = []
        for row_scores in scored[: len(rows)]:
            tops = zip(row_scores.top_ids_TxK.tolist(), row_scores.top_log_probs_TxK.tolist(), strict=True)
            pairs = zip(row_scores.log_probs.tolist(), tops, strict=True)
            scores.append([TokenScore(log_prob, dict(zip(*top, strict=True))) for log_prob, top in pairs])
        return scores
