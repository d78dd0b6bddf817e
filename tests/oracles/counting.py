"""Counts that the closed forms of several families share."""

from types import SimpleNamespace
from typing import NamedTuple

from oracles.positions import T5_BUCKETS


def multiple_of_8(numerator: int, denominator: int, width: int) -> int:
    """The least multiple of 8 that is numerator / denominator times the width, or more."""
    return next(n for n in range(8, 8 * width, 8) if denominator * n >= numerator * width)


def norm(s: SimpleNamespace) -> int:
    """Parameters of one."""
    return {"layer": 2 * s.model_dim, "rms": s.model_dim, "scale": 1}[s.norm]


def bias(unit: SimpleNamespace, reach: int) -> int:
    """Parameters of the relative bias of a gated unit."""
    return {"none": 0, "toeplitz": 2 * reach - 1, "t5": T5_BUCKETS, "rope": 2 * unit.shared_dim}[unit.relative_bias]


def taps_read(s: SimpleNamespace, taps: int, length: int) -> int:
    """How many taps of a row's tokens read one of its tokens."""
    own = taps - 1 if s.causal else taps // 2
    return sum(0 <= t + i - own < length for t in range(length) for i in range(taps))


def pairs(s: SimpleNamespace, length: int) -> list[tuple[int, int]]:
    """Those of a row that see each other."""
    return [(t, u) for t in range(length) for u in range(length) if u <= t or not s.causal]


def near(s: SimpleNamespace, length: int, reach: int) -> int:
    """How many of these pairs are nearer than `reach`."""
    return sum(abs(t - u) < reach for t, u in pairs(s, length))


class Chunks(NamedTuple):
    """A causal row in chunks: its pairs inside them, tokens that enter a sum that another chunk reads, and readers."""

    inside: int
    entering: int
    reading: int


def causal_chunks(length: int, size: int) -> Chunks:
    """Of a row."""
    chunk = lambda t: t // size
    return Chunks(
        sum(chunk(t) == chunk(u) for t in range(length) for u in range(t + 1)),
        sum(chunk(t) < chunk(length - 1) for t in range(length)),
        sum(chunk(t) > 0 for t in range(length)),
    )


def sums_read(s: SimpleNamespace, length: int, size: int) -> int:
    """How often a token enters a sum or reads one: of the chunks before, or of the whole row."""
    return sum(causal_chunks(length, size)[1:]) if s.causal else 2 * length


def linear_sums(s: SimpleNamespace, length: int, features: int, values: int) -> int:
    """Multiplications of one head of linear attention, `values` with the denominator, if there is one."""
    inside = causal_chunks(length, s.linear.chunk_size).inside if s.causal else 0
    return inside * (features + values) + sums_read(s, length, s.linear.chunk_size) * features * values
