"""Needles in held-out text: whether a model's likeliest digits are those of a code that stands far back.

The rows are those of `data.corpus=needle`; only the last tokens of a row have logits.
"""

import functools
from typing import Any

import jax
import numpy as np

from benchmarks.pretrained.held_out import HeldOut
from flash_lm.data.synthetic.needle import NeedleOptions, Needles
from flash_lm.inference.model import TrainedModel
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.runs.jsonl import Line

DEPTHS = 10  # of the needles: row n has its needle in tenth n mod 10
_CHARACTERS = 1 << 20  # of the text that rows are cut from


class NeedleTest:
    """A model that is asked for needles in one text."""

    def __init__(self, model: TrainedModel, text: HeldOut):
        """Compiles nothing before the first call."""
        self._model, self._text, self._options = model, text, NeedleOptions()
        read = lambda: text.beginning(model.tokenizer, _CHARACTERS)
        self._needles = Needles(text.split, read, model.tokenizer, self._options)
        self._last = jax.jit(functools.partial(_likeliest, model.model, self._options.digits))

    def __call__(self, length: int, rows: int) -> Line:
        """One line: the share of codes with all digits right, given those before, in all and by depth.

        Args:
            length: tokens of a row, code included.
            rows: one of each tenth of the text at a time.
        """
        self._model.model.abstract.check_length(length)
        right = np.array([self._digits_right(number, length) for number in range(rows)])
        codes = right.all(axis=1)
        depths = [codes[depth::DEPTHS] for depth in range(min(DEPTHS, rows))]
        return {
            "text": self._text.text,
            "split": self._text.split,
            "length": length,
            "rows": rows,
            "accuracy": float(codes.mean()),
            "digit_accuracy": float(right.mean()),
            "by_depth": [
                {"from": i / DEPTHS, "to": (i + 1) / DEPTHS, "rows": len(x), "accuracy": float(x.mean())}
                for i, x in enumerate(depths)
            ],
        }

    def _digits_right(self, number: int, length: int) -> np.ndarray:
        """Whether the likeliest token is the digit, for each digit of a row."""
        ids = self._needles.example(number, length).ids
        with jax.set_mesh(self._model.mesh):
            likeliest = np.asarray(self._last(self._model.params, ids[None, :-1]))
        return likeliest == ids[-self._options.digits :]


def _likeliest(model: Any, count: int, params: Any, ids_1xL: jax.Array) -> jax.Array:
    """The likeliest token after each of the last `count`."""
    bound = model.bind(params)
    features_1xLxD = bound.features(ModelInputs(ids_1xL, packed=False))
    return bound.logits(features_1xLxD[:, -count:]).argmax(axis=-1)[0]
