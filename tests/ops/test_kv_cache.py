"""The ring buffer of the last tokens, against a list of all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.kv_cache import Ring, empty_ring, positions_in, roll_ring, unroll_ring, write_token

SIZE, ROWS, HEADS = 5, 3, 2


def tokens(random, length: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(random.standard_normal((ROWS, HEADS, length, width)).astype(np.float32) for width in (3, 2))


def assert_holds(ring: Ring, all_tokens, counts: np.ndarray) -> None:
    """Checks that each slot holds the newest token with its position modulo the size."""
    positions = np.asarray(jax.jit(positions_in)(ring, counts - 1))
    for b in range(ROWS):
        expected = {p % SIZE: p for p in range(counts[b])}
        for slot in range(SIZE):
            assert positions[b, slot] == expected[slot] if slot in expected else positions[b, slot] < 0
            if slot in expected:
                for stored, every in zip(map(np.asarray, ring), all_tokens[b], strict=True):
                    np.testing.assert_array_equal(stored[b, :, slot], np.stack(every)[expected[slot]])


@pytest.mark.parametrize("lengths", [(0, 3, 5), (12, 1, 7)])
def test_pieces_of_any_length_and_single_tokens(lengths):
    """Sequences are at different positions; padding and inactive sequences have no effect."""
    random, ring = np.random.default_rng(0), empty_ring(ROWS, HEADS, SIZE, 3, 2, jnp.dtype("float32"))
    all_tokens, counts = [([], []) for _ in range(ROWS)], np.zeros(ROWS, np.int32)
    for piece in (lengths, (2, 0, 9), (1, 1, 4)):
        new = tokens(random, max(piece))
        joined = jax.jit(unroll_ring)(ring, *new, counts)
        ring = jax.jit(roll_ring, static_argnums=1)(joined, SIZE, counts, np.array(piece, np.int32))
        for b, length in enumerate(piece):
            first = max(counts[b] - SIZE, 0)
            for cached, tokens_so_far, arriving in zip(map(np.asarray, joined), all_tokens[b], new, strict=True):
                tokens_so_far.extend(arriving[b, :, t] for t in range(length))
                window = slice(first - counts[b] + SIZE, length + SIZE)
                expected = (
                    np.stack(tokens_so_far[first:], axis=1)
                    if tokens_so_far[first:]
                    else np.zeros((HEADS, 0, cached.shape[-1]))
                )
                np.testing.assert_array_equal(cached[b, :, window], expected)
        counts += np.asarray(piece, np.int32)
        assert_holds(ring, all_tokens, counts)
    for real in ((True, False, True), (True, True, True)) * 4:
        new = tokens(random, 1)
        ring = jax.jit(write_token)(ring, *new, counts, np.array(real))
        for b in np.flatnonzero(real):
            for tokens_so_far, arriving in zip(all_tokens[b], new, strict=True):
                tokens_so_far.append(arriving[b, :, 0])
        counts += np.asarray(real, np.int32)
        assert_holds(ring, all_tokens, counts)
