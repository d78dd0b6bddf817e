"""Counts of parameters and products that the closed forms of several families share."""

from types import SimpleNamespace
from typing import NamedTuple

from oracles.positions import T5_BUCKETS


def multiple_of_8(numerator: int, denominator: int, width: int) -> int:
    """Rounds numerator / denominator · width up to a multiple of 8."""
    return next(n for n in range(8, 8 * width, 8) if denominator * n >= numerator * width)


def norm_parameters(s: SimpleNamespace) -> int:
    """Parameters of one norm."""
    return {"layer": 2 * s.model_dim, "rms": s.model_dim, "scale": 1}[s.norm]


def bias_parameters(unit: SimpleNamespace, reach: int) -> int:
    """Parameters of the relative bias of a gated unit."""
    return {"none": 0, "toeplitz": 2 * reach - 1, "t5": T5_BUCKETS, "rope": 2 * unit.shared_dim}[unit.relative_bias]


def count_tap_reads(s: SimpleNamespace, taps: int, length: int) -> int:
    """Counts the taps, over all tokens of a sequence, that fall on one of its tokens."""
    center = taps - 1 if s.causal else taps // 2
    return sum(0 <= t + i - center < length for t in range(length) for i in range(taps))


def visible_pairs(s: SimpleNamespace, length: int) -> list[tuple[int, int]]:
    """Pairs (query, key) of a sequence that see each other."""
    return [(t, u) for t in range(length) for u in range(length) if u <= t or not s.causal]


def count_near_pairs(s: SimpleNamespace, length: int, reach: int) -> int:
    """Counts the visible pairs at a distance below `reach`."""
    return sum(abs(t - u) < reach for t, u in visible_pairs(s, length))


class Chunks(NamedTuple):
    """Counts for a causal sequence in chunks.

    Attributes:
        inside: pairs within a chunk.
        entering: tokens that are added to a sum that a later chunk reads.
        reading: tokens that read the sum of earlier chunks.
    """

    inside: int
    entering: int
    reading: int


def count_chunk_terms(length: int, size: int) -> Chunks:
    """Counts pairs within chunks and uses of the sums over chunks, for one causal sequence."""
    chunk = lambda t: t // size
    return Chunks(
        sum(chunk(t) == chunk(u) for t in range(length) for u in range(t + 1)),
        sum(chunk(t) < chunk(length - 1) for t in range(length)),
        sum(chunk(t) > 0 for t in range(length)),
    )


def count_sum_accesses(s: SimpleNamespace, length: int, size: int) -> int:
    """Counts how often tokens enter or read a sum: over earlier chunks if causal, else over the sequence."""
    return sum(count_chunk_terms(length, size)[1:]) if s.causal else 2 * length


def linear_sums(s: SimpleNamespace, length: int, features: int, values: int) -> int:
    """Multiplications of one head of linear attention; `values` counts the denominator, if the family has one."""
    inside = count_chunk_terms(length, s.linear.chunk_size).inside if s.causal else 0
    return inside * (features + values) + count_sum_accesses(s, length, s.linear.chunk_size) * features * values
