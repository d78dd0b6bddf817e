"""Log-probabilities of the tokens of whole rows, for a service: programs of two sizes, both compiled at the start."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flash_lm.inference.engine import Engine

_SIZE = 128  # tokens of a row that the device sees at a time


class TokenScore(NamedTuple):
    """A token of a row, after those before it.

    Attributes:
        log_prob: in nats.
        top: ids of the likeliest tokens at its place and their log-probabilities, the likeliest first.
    """

    log_prob: float
    top: dict[int, float]


class TokenScorer:
    """Scores a few rows at a time."""

    def __init__(self, engine: Engine, rows: int, capacity: int, top: int):
        """Compiles nothing.

        Args:
            engine: the model's engine.
            rows: most rows at a time.
            capacity: most tokens in a row.
            top: how many of the likeliest tokens are found.
        """
        self._engine, self._rows, self._capacity, self._top = engine, rows, capacity, top

    def compile(self) -> None:
        """Compiles what calls need."""
        for count in {1, self._rows}:
            self([[0, 0]] * count)

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[list[TokenScore]]:
        """The scores of the tokens of each row after its first.

        Args:
            rows: token ids, at least two each.
        """
        count = 1 if len(rows) == 1 else self._rows
        filled = [*rows, *[[0, 0]] * (count - len(rows))]
        arrays = [np.array(row, np.int32) for row in filled]
        with self._engine.turn:
            scored = self._engine.score_rows(arrays, self._top, min(_SIZE, self._capacity), self._capacity)
        found = []
        for one in scored[: len(rows)]:
            tops = zip(one.top_ids_TxK.tolist(), one.top_log_probs_TxK.tolist(), strict=True)
            pairs = zip(one.log_probs.tolist(), tops, strict=True)
            found.append([TokenScore(log_prob, dict(zip(*top, strict=True))) for log_prob, top in pairs])
        return found
