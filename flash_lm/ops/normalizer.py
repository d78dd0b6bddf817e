"""The factor of the scores and the divisor N for attention without a softmax, from `model.normalizer`.

count: N is the number of visible keys, so it is exact under padding, packing and decoding.
An integer: N is that constant.
length: N is the row's length, as in published code.
paper: relu²(q kᵀ / n + b), as in FLASH's appendix; n is the row's length.
paper_N: the same with the constant N for n; the sums over chunks are divided by the number of their tokens.

Inside a chunk, n is the chunk's length, except for count. `length` and `paper` depend on the length of the whole row,
so they do not support decoding.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

# (keys that each query sees, int32; tokens in the row or the chunk) -> N of each query, float32
Divisor = Callable[[jax.Array, int], jax.Array]


def _count(count_BxL: jax.Array, length: int) -> jax.Array:
    return jnp.maximum(count_BxL, 1).astype(jnp.float32)


def _length(count_BxL: jax.Array, length: int) -> jax.Array:
    return jnp.full(count_BxL.shape, length, jnp.float32)


def _constant(n: int) -> Divisor:
    return lambda count_BxL, length: jnp.full(count_BxL.shape, n, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The functions of one normalizer.

    Attributes:
        over_all: N over all pairs of tokens.
        in_chunk: N inside a chunk.
        of_sum: N of the linear part, which has no function whose argument could be scaled.
        scores: what divides the scores in place of √K, from the length of the row; None: √K does.
        undecodable: a sentence on why decoding is not supported; None: it is.
    """

    over_all: Divisor
    in_chunk: Divisor
    of_sum: Divisor
    scores: Callable[[int], int] | None = None
    undecodable: str | None = None

    def scale(self, width: int, length: int, function: str) -> float:
        """Factor of q kᵀ: 1/√width, or 1/n in the paper's appendix. Softmax has its own normalisation."""
        return width**-0.5 if self.scores is None or function == "softmax" else 1 / self.scores(length)

    def scale_in_chunk(self, width: int, span: int, function: str) -> float:
        """The same in a chunk, where n is the number of tokens there."""
        return width**-0.5 if self.scores is None or function == "softmax" else 1 / span


def _refusal(name: str) -> str:
    return f"model.normalizer={name} depends on the whole row and cannot be decoded: use count, an integer or paper_N"


def _paper(of_sum: Divisor, scores: Callable[[int], int], undecodable: str | None = None) -> Normalizer:
    return Normalizer(_constant(1), _constant(1), of_sum, scores, undecodable)


_NAMED = {
    "count": Normalizer(_count, _count, _count),
    "length": Normalizer(_length, _length, _length, undecodable=_refusal("length")),
    "paper": _paper(_length, lambda length: length, _refusal("paper")),
}
_OF_PAPER = "paper_"


@functools.cache
def normalizer(text: str) -> Normalizer:
    """The normalizer that `model.normalizer` names; always the same object, so that equal models are equal to jax.jit.

    Raises:
        ValueError: it is neither a name nor an integer.
    """
    if text in _NAMED:
        return _NAMED[text]
    n = int(text.removeprefix(_OF_PAPER))
    if text.startswith(_OF_PAPER):
        return _paper(_count, lambda length: n)
    return Normalizer(_constant(n), _length, _constant(n))
