"""Predicts labels of texts, or of pairs of texts, with a model of task=classify."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.config.registry import CORPORA
from flash_lm.data.batches import stack
from flash_lm.data.examples import make_row
from flash_lm.data.labelled import sizes_in_row
from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.runs.hosts import fetch_array
from flash_lm.training.sharding import batch_sharding, round_up_rows
from flash_lm.training.train_state import Params

ROWS = 16  # batch size on the device; a single text has a smaller batch


class TextRow(NamedTuple):
    """The tokens of a text or of a pair, cut to the sequence length of training.

    Attributes:
        tokens: the tokens that are kept.
        left_out: number of tokens cut off at the end of the text, or of both texts.
    """

    tokens: list[int]
    left_out: int


class TextClassifier:
    """Predicts labels.

    Attributes:
        pairs: whether the model was trained on pairs of texts.
        length: sequence length; longer texts are cut off, as in training.
    """

    def __init__(self, trained: TrainedModel):
        """Compiles nothing before the first call.

        Raises:
            InputError: the model does not predict labels of texts.
        """
        if not trained.labels or CORPORA[trained.config.data.corpus].answers != "text":
            raise InputError(f"{trained.name} does not predict labels of texts: train it with --config.task=classify")
        self._trained = trained
        self.pairs, self.length = trained.config.data.pair_column is not None, trained.config.data.length
        self._probabilities = jax.jit(self._label_probabilities)

    def __call__(self, rows: Sequence[list[int]]) -> list[dict[str, float]]:
        """The probability of each label, from the tokens of each text (see `encode`)."""
        # Batch by batch: their number has no limit.
        probabilities = []
        for i in range(0, len(rows), ROWS):
            probabilities += self._classify_batch(rows[i : i + ROWS])
        return [dict(zip(self._trained.labels, row, strict=True)) for row in probabilities]

    def compile(self) -> None:
        """Compiles all shapes that a call may need."""
        for count in (1, ROWS):
            self._classify_batch([[0]] * count)

    def encode(self, texts: Sequence[str]) -> TextRow:
        """Tokenises a text or a pair.

        Args:
            texts: one text, or two.

        Raises:
            InputError: a text is empty or unknown to the tokenizer, or their number is not that of training.
        """
        if len(texts) != 1 + self.pairs:
            kind = "pairs of texts" if self.pairs else "single texts"
            raise InputError(f"{self._trained.name} predicts labels of {kind}: give them")
        # Each text ends in end-of-text before it is cut, as in training.
        end = self._trained.tokenizer.end
        ids = [np.append(self._trained.encode(text, "text"), end) for text in texts]
        sizes = sizes_in_row([len(x) for x in ids], self.length)
        tokens = np.concatenate([x[:size] for x, size in zip(ids, sizes, strict=True)])
        return TextRow(tokens.tolist(), sum(map(len, ids)) - len(tokens))

    def _classify_batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Label probabilities of at most `ROWS` sequences."""
        # Two batch sizes, so that little is compiled; missing entries repeat the others.
        mesh = self._trained.mesh
        count = round_up_rows(1 if len(rows) == 1 else ROWS, mesh)
        batch = stack([make_row(np.array(row, np.int32), self.length) for row in rows])
        pad = lambda x_BxL: np.resize(x_BxL, (count, self.length)).astype(np.int32)
        with jax.set_mesh(mesh):
            names = ("inputs_BxL", "segment_ids_BxL")
            arrays = jax.device_put([pad(batch[name]) for name in names], batch_sharding(mesh))
            return fetch_array(self._probabilities(self._trained.params, *arrays))[: len(rows)].tolist()

    def _label_probabilities(self, params: Params, inputs_BxL: jax.Array, segment_ids_BxL: jax.Array) -> jax.Array:
        """Softmax over the labels, B×C float32."""
        logits_Bx1xC = self._trained.model.bind(params)(inputs_BxL, segment_ids_BxL)
        return jax.nn.softmax(jnp.asarray(logits_Bx1xC[:, 0, : len(self._trained.labels)]), axis=-1)
