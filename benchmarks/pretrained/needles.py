"""Needles in held-out text: whether a model's likeliest digits are those of a code that stands far back.

The rows are those of `data.corpus=needle`. A model that chats is given the text and the question as a message, and its
answer begins as the needle does, up to the code.
"""

import functools

import jax
import numpy as np

from benchmarks.pretrained.held_out import HeldOut
from flash_lm.data.synthetic.needle import NeedleOptions, Needles
from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.runs.jsonl import Line
from flash_lm.training.train_state import ModelFunction, Params

DEPTHS = 10  # of the needles: row n has its needle in tenth n mod 10
_CHARACTERS = 1 << 20  # of the text that rows are cut from
_MESSAGE = "Read this text, and remember the codes in it.\n\n{}\n\nWhat is the code of {}? Answer with the code."
_ANSWER = "The code of {} is "
_SPARE = 8  # tokens of a row, since names differ in theirs


class NeedleTest:
    """A model that is asked for needles in one text."""

    def __init__(self, model: TrainedModel, text: HeldOut, codes: int):
        """Compiles nothing before the first call.

        Args:
            model: the model.
            text: what rows are cut from.
            codes: codes with different names in each row, one of which is asked for.
        """
        self._model, self._text = model, text
        self._options = NeedleOptions(needles=codes, digits=4, length=None)  # type: ignore[arg-type]
        read = lambda: text.beginning(model.tokenizer, _CHARACTERS)
        self._needles = Needles(text.split, read, model.tokenizer, self._options)
        self._likeliest = jax.jit(functools.partial(_likeliest, model.model, self._options.digits))
        self._chats = model.can_chat

    def __call__(self, length: int, rows: int) -> Line:
        """One line: the share of codes with all digits right, given those before, in all and by depth.

        Args:
            length: tokens of a row, at most.
            rows: one of each tenth of the text at a time.

        Raises:
            InputError: the rows are too short for needles, or longer than the model's positions.
        """
        self._model.model.abstract.check_length(length)
        with jax.set_mesh(self._model.mesh):
            params = self._model.params
            right = np.array([self._digits_right(params, number, length) for number in range(rows)])
        codes = np.array([row.all() for row in right])
        depths = [codes[depth::DEPTHS] for depth in range(min(DEPTHS, rows))]
        return {
            "text": self._text.text,
            "split": self._text.split,
            "form": "chat" if self._chats else "plain",
            "codes": self._options.needles,
            "length": length,
            "rows": rows,
            "accuracy": float(codes.mean()),
            "digit_accuracy": float(right.mean()),
            "by_depth": [
                {"from": i / DEPTHS, "to": (i + 1) / DEPTHS, "rows": len(x), "accuracy": float(x.mean())}
                for i, x in enumerate(depths)
            ],
        }

    def _digits_right(self, params: Params, number: int, length: int) -> np.ndarray:
        """Whether the likeliest token is the digit, for each digit of a row."""
        ids = self._chat(number, length) if self._chats else self._needles.example(number, length).ids
        inputs_1xL = np.zeros((1, max(length, len(ids) - 1)), np.int32)  # what follows a token does not change it
        inputs_1xL[0, : len(ids) - 1] = ids[:-1]
        first = len(ids) - 1 - self._options.digits  # whose next token is the first digit
        return np.asarray(self._likeliest(params, inputs_1xL, first)) == ids[-self._options.digits :]

    def _chat(self, number: int, length: int) -> np.ndarray:
        """The tokens of a row as a chat, up to the code in the answer."""
        # The shortest row tells how many tokens are not of the text.
        frame = self._as_chat(self._needles.example(number, self._needles.smallest).ids)
        room = length - (len(frame) - self._needles.smallest) - _SPARE
        if room < self._needles.smallest:
            raise InputError(f"a chat with needles has more than {length} tokens: ask for {len(frame) + _SPARE}")
        return self._as_chat(self._needles.example(number, room).ids)

    def _as_chat(self, ids: np.ndarray) -> np.ndarray:
        text, question = self._model.tokenizer.decode(ids[1:]).rsplit("\n", 1)
        *_, name, _, _ = question.split()
        prompt = self._model.chat_encoder.prompt([{"role": "user", "content": _MESSAGE.format(text, name)}])
        (answer,) = self._model.tokenizer.encode([_ANSWER.format(name)])
        return np.concatenate([prompt, answer, ids[-self._options.digits :]])


def _likeliest(model: ModelFunction, count: int, params: Params, ids_1xL: jax.Array, first: int) -> jax.Array:
    """The likeliest token after each of `count` tokens, from number `first` on."""
    bound = model.bind(params)
    features_1xLxD = bound.features(ModelInputs(ids_1xL, packed=False))
    return bound.logits(jax.lax.dynamic_slice_in_dim(features_1xLxD, first, count, axis=1)).argmax(axis=-1)[0]
