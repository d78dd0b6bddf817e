"""Normalizer N of attention without a softmax: scale of the scores and divisor of the weights.

`model.normalizer` says what N is:

count: the number of visible keys, so it is exact under padding, packing and decoding.
An integer: that constant.
length: the length of the sequence, as in published code.

Inside a chunk N is the chunk's length, except for count. `model.divides` says what N divides:

weights: f(q kᵀ / √K + b) / N; and the sums over chunks.
scores: f(q kᵀ / N + b), as in the appendix of FLASH. N cannot be a count. Sums over chunks are divided by the
    number of their tokens, as in the appendix.

length_everywhere: as length and scores, and the length also divides the sums over chunks, whatever `model.divides`
    is. In a bidirectional model that is the appendix; its causal sums are of the chunks before alone.

`length` and `length_everywhere` depend on the length of the full sequence, so they do not support decoding.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

# (keys that each query sees, int32; tokens in the sequence or the chunk) -> N of each query, float32
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
        over_all: divisor of the weights of all pairs of tokens.
        in_chunk: the same inside a chunk.
        of_sum: divisor of the linear part, which has no function whose argument could be scaled.
        of_scores: N of the scores in place of √K, from the length of the sequence; None: √K divides them.
        undecodable: a sentence on why decoding is not supported; None: it is.
    """

    over_all: Divisor
    in_chunk: Divisor
    of_sum: Divisor
    of_scores: Callable[[int], int] | None = None
    undecodable: str | None = None

    def scale(self, width: int, length: int, function: str) -> float:
        """Factor of q kᵀ in a sequence of this length: 1/√width, or 1/N. Softmax is normalised anyway."""
        return width**-0.5 if self.of_scores is None or function == "softmax" else 1 / self.of_scores(length)

    def scale_in_chunk(self, width: int, span: int, function: str) -> float:
        """The scale inside a chunk, where N is the number of tokens within reach."""
        return width**-0.5 if self.of_scores is None or function == "softmax" else 1 / span


def _score_scale(n: Callable[[int], int], of_sum: Divisor, undecodable: str | None = None) -> Normalizer:
    return Normalizer(_constant(1), _constant(1), of_sum, n, undecodable)


def _refusal(name: str) -> str:
    return f"model.normalizer={name} depends on the full sequence and cannot be decoded: use an integer"


_COUNT = Normalizer(_count, _count, _count)
_LENGTH, _EVERYWHERE = _refusal("length"), _refusal("length_everywhere")
# normalizer, divides -> its functions; count cannot divide scores (`divisor_problems`), so this is for softmax, which
# has none of it but the sums
_NAMED = {
    ("count", "weights"): _COUNT,
    ("count", "scores"): _COUNT,
    ("length", "weights"): Normalizer(_length, _length, _length, undecodable=_LENGTH),
    ("length", "scores"): _score_scale(lambda length: length, _count, _LENGTH),
    ("length_everywhere", "weights"): _score_scale(lambda length: length, _length, _EVERYWHERE),
    ("length_everywhere", "scores"): _score_scale(lambda length: length, _length, _EVERYWHERE),
}


def needs_whole_row(text: str) -> bool:
    """Whether `model.normalizer` depends on the length of the full sequence, whatever N divides."""
    return normalizer(text, "scores").undecodable is not None


@functools.cache
def normalizer(text: str, divides: str) -> Normalizer:
    """The normalizer of two keys of the model; always the same object, so that equal models are equal to jax.jit.

    Args:
        text: `model.normalizer`.
        divides: `model.divides`.

    Raises:
        ValueError: `text` is neither a name nor an integer.
    """
    if named := _NAMED.get((text, divides)):
        return named
    n = int(text)
    if divides == "scores":
        return _score_scale(lambda length: n, _count)
    return Normalizer(_constant(n), _length, _constant(n))
