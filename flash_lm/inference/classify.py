"""Labels of texts, or of pairs of texts, from a model that was trained on them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.config.registry import CORPORA
from flash_lm.data.batches import stack
from flash_lm.data.examples import row_of
from flash_lm.data.labelled import sizes_in_row
from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.runs.hosts import fetched
from flash_lm.training.sharding import batch_sharding, round_up_rows
from flash_lm.training.train_state import Params

ROWS = 16  # on the device at a time; a text alone has a smaller batch


class TextRow(NamedTuple):
    """A text, or both texts of a pair, as a row of training has them.

    Attributes:
        tokens: those that fit into the row.
        left_out: how many did not, of the text's end, or of both ends.
    """

    tokens: list[int]
    left_out: int


class TextClassifier:
    """Predicts labels.

    Attributes:
        pairs: whether the model was trained on pairs of texts.
        length: tokens of a row; what does not fit is cut off, as in training.
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
        self._probabilities = jax.jit(self._of_rows)

    def __call__(self, rows: Sequence[list[int]]) -> list[dict[str, float]]:
        """The probability of each label, for the tokens of each row from `encode`."""
        found = []
        for i in range(0, len(rows), ROWS):
            found += self._some(rows[i : i + ROWS])
        return [dict(zip(self._trained.labels, row, strict=True)) for row in found]

    def compile(self) -> None:
        """Compiles all shapes that a call may need."""
        for count in (1, ROWS):
            self._some([[0]] * count)

    def encode(self, texts: Sequence[str]) -> TextRow:
        """The row of a text, or of a pair.

        Args:
            texts: one text, or two.

        Raises:
            InputError: a text is empty or unknown to the tokenizer, or there are not as many as in training.
        """
        if len(texts) != 1 + self.pairs:
            kind = "pairs of texts" if self.pairs else "single texts"
            raise InputError(f"{self._trained.name} predicts labels of {kind}: give them")
        end = self._trained.tokenizer.end
        ids = [np.append(self._trained.encode(text, "text"), end) for text in texts]
        sizes = sizes_in_row([len(x) for x in ids], self.length)
        tokens = np.concatenate([x[:size] for x, size in zip(ids, sizes, strict=True)])
        return TextRow(tokens.tolist(), sum(map(len, ids)) - len(tokens))

    def _some(self, rows: Sequence[list[int]]) -> list[list[float]]:
        mesh = self._trained.mesh
        count = round_up_rows(1 if len(rows) == 1 else ROWS, mesh)
        batch = stack([row_of(np.array(row, np.int32), self.length) for row in rows])
        place = lambda x_BxL: np.resize(x_BxL, (count, self.length)).astype(np.int32)  # repeats rows
        with jax.set_mesh(mesh):
            names = ("inputs_BxL", "segment_ids_BxL")
            arrays = jax.device_put([place(batch[name]) for name in names], batch_sharding(mesh))
            return fetched(self._probabilities(self._trained.params, *arrays))[: len(rows)].tolist()

    def _of_rows(self, params: Params, inputs_BxL: jax.Array, segment_ids_BxL: jax.Array) -> jax.Array:
        """B×C, float32."""
        logits_Bx1xC = self._trained.model.bind(params)(inputs_BxL, segment_ids_BxL)
        return jax.nn.softmax(jnp.asarray(logits_Bx1xC[:, 0, : len(self._trained.labels)]), axis=-1)
