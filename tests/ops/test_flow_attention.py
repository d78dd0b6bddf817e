"""Flow attention against its definition, and tests for the bugs of public implementations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.flowformer import flow, sigmoid
from oracles.segments import visibility

from flash_lm.ops.flow_attention import flow_attention, no_flows, prefill_flow
from flash_lm.ops.segments import find_segments

H, L, K, E = 2, 75, 6, 4  # more tokens than two chunks of the plain sums
IDS = np.array([[1] * 10 + [0] * 3 + [2] * 40 + [1] * 1 + [3] * 19 + [0] * 2, [3] * L], np.int32)
ONE_DOCUMENT = np.ones((2, L), np.int32)
both_ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def inputs(length: int = L) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values."""
    return draw(2, H, length, K), draw(3, H, length, K)[:2], draw(4, H, length, E)[:2]


@functools.partial(jax.jit, static_argnames=("causal", "packed", "chunk_size", "clamp"))
def run(q, k, v, ids, causal=True, packed=True, chunk_size=8, clamp=1.0):
    options = {"causal": causal, "packed": packed, "chunk_size": chunk_size, "clamp": clamp}
    return flow_attention(q, k, v, find_segments(ids), **options)


def expected(q, k, v, ids, causal: bool, clamp: float = 1.0) -> np.ndarray:
    out = np.zeros(v.shape)
    for b, h in np.ndindex(v.shape[:2]):
        features = (sigmoid(x[b, h].astype(float)) for x in (q, k))
        out[b, h] = flow(*features, v[b, h].astype(float), visibility(ids[b].tolist(), causal), clamp)
    return out


@pytest.mark.parametrize("chunk_size", [8, 128])
@both_ways
def test_values(causal, chunk_size):
    actual = run(*inputs(), IDS, causal=causal, chunk_size=chunk_size)
    np.testing.assert_allclose(actual, expected(*inputs(), IDS, causal), atol=1e-5)


def test_one_document_per_sequence_takes_one_pass():
    ids = np.where(np.arange(L) < [[L], [50]], 1, 0).astype(np.int32)
    actual = run(*inputs(), ids, causal=False, packed=False)
    np.testing.assert_allclose(actual, expected(*inputs(), ids, False), atol=1e-5)


@both_ways
def test_gradients(causal):
    """Derivative along a random direction in queries, keys and values."""
    q, k, v = inputs()
    out_weights, directions = draw(5, H, L, E)[:2], [draw(6 + i, *x.shape[1:])[:2] for i, x in enumerate((q, k, v))]
    loss_of = lambda *x: (out_weights * run(*x, IDS, causal=causal)).sum()
    grads = jax.jit(jax.grad(loss_of, (0, 1, 2)))(q, k, v)
    slope = sum((np.asarray(g) * d).sum() for g, d in zip(grads, directions, strict=True))

    def loss(step: float) -> float:
        shifted = (x.astype(float) + step * d for x, d in zip((q, k, v), directions, strict=True))
        return (out_weights * expected(*shifted, IDS, causal)).sum()

    assert slope == pytest.approx((loss(1e-6) - loss(-1e-6)) / 2e-6, rel=1e-4)


@pytest.mark.slow("runs prefills of five lengths, operation by operation")
def test_from_a_state_at_any_split():
    """Sequences at different positions, any number of new tokens, also none, and NaN in the padding."""
    arrays, out = inputs(), expected(*inputs(), ONE_DOCUMENT, True)
    state, starts = no_flows(2, H, K, E), np.zeros(2, np.int32)
    for lengths in ((1, 0), (0, 40), (33, 2), (1, 1), (40, 32)):
        new = [np.full((2, H, max(lengths), x.shape[-1]), np.nan, np.float32) for x in arrays]
        for b, length in enumerate(lengths):
            for part, x in zip(new, arrays, strict=True):
                part[b, :, :length] = x[b, :, starts[b] : starts[b] + length]
        index = jnp.arange(max(lengths), dtype=jnp.int32)[None]
        real, positions = index < jnp.array(lengths)[:, None], jnp.asarray(starts)[:, None] + index
        actual, state = prefill_flow(*map(jnp.asarray, new), state, positions, real, chunk_size=8, clamp=1.0)
        for b, length in enumerate(lengths):
            expected_part = out[b, :, starts[b] : starts[b] + length]
            np.testing.assert_allclose(actual[b, :, :length], expected_part, atol=1e-5)
        starts = starts + np.array(lengths, np.int32)


@both_ways
def test_a_document_of_one_token(causal):
    """All its flows are one, so its output is σ(1) v for any query and key."""
    q, k, v = inputs()
    out = np.asarray(run(q, k, v, IDS, causal=causal))
    np.testing.assert_allclose(out[0, :, 53], sigmoid(1.0) * v[0, :, 53], rtol=1e-5)


def test_flows_are_conserved():
    """With equally strong sources and values of one, out = σ(Î), and Î sums to the length of a document."""
    q, k, v = inputs()
    out = np.asarray(run(q, k, np.ones_like(v), IDS, causal=False, clamp=1e-9), np.float64)
    for start, end in ((0, 10), (13, 53), (53, 54), (54, 73)):
        gate = out[0, :, start:end, 0]
        np.testing.assert_allclose(np.log(gate / (1 - gate)).sum(axis=-1), end - start, rtol=1e-4)


@both_ways
def test_heads_do_not_compete(causal):
    """The authors' code for Long Range Arena takes the softmax over heads, its last axis, instead of sources."""
    q, k, v = inputs()
    before, changed = np.asarray(run(q, k, v, ONE_DOCUMENT, causal=causal)), k.copy()
    changed[:, 0] += 1
    after = np.asarray(run(q, changed, v, ONE_DOCUMENT, causal=causal))
    np.testing.assert_array_equal(after[:, 1], before[:, 1])
    assert np.abs(after[:, 0] - before[:, 0]).max() > 1e-2


@both_ways
def test_padding_is_in_no_sum(causal):
    """A mask that only zeroes values (Flowformer #6) leaves large padding in the flows."""
    q, k, v = inputs()
    keep = (IDS > 0)[:, None, :, None]
    loud = (np.where(keep, x, garbage).astype(np.float32) for x, garbage in ((q, 30), (k, 20), (v, 1e6)))
    actual, clean = (np.asarray(run(*x, IDS, causal=causal)) for x in (loud, (q, k, v)))
    np.testing.assert_array_equal(np.where(keep, actual, 0), np.where(keep, clean, 0))


def test_competition_depends_on_no_later_token():
    """A softmax over the sequence, as in the bidirectional form, would let later sources compete with earlier ones."""
    q, k, v = inputs()
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[:, :, 40:] = -3 * x[:, :, 40:] + 1
    before, after = (np.asarray(run(*x, ONE_DOCUMENT)) for x in ((q, k, v), changed))
    np.testing.assert_array_equal(after[:, :, :40], before[:, :, :40])


def test_a_late_document_is_as_exact_as_the_first():
    """Computed as differences of running sums it would not be, as a long document with large inputs comes first."""
    length, late_length = 2048, 12
    q, k, v = inputs(length)
    q[:, :, :-late_length] += 5
    k[:, :, :-late_length] += 5
    ids = np.where(np.arange(length) < length - late_length, 1, 2).astype(np.int32)[None].repeat(2, axis=0)
    late = np.asarray(run(q, k, v, ids, chunk_size=128))[:, :, -late_length:]
    alone = run(*(x[:, :, -late_length:] for x in (q, k, v)), np.ones((2, late_length), np.int32), chunk_size=128)
    np.testing.assert_allclose(late, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clamp", [0.5, 1.0, 10.0])
def test_the_clamp_bounds_the_competition(clamp):
    actual = run(*inputs(), IDS, clamp=clamp)
    np.testing.assert_allclose(actual, expected(*inputs(), IDS, True, clamp), atol=1e-5)


@both_ways
def test_small_features_are_not_drowned(causal):
    """An ε added to sums of small features, 1e-6 in the authors' code, would dominate them."""
    q, k, v = inputs()
    q, k = q - 16, k - 16
    np.testing.assert_allclose(run(q, k, v, IDS, causal=causal), expected(q, k, v, IDS, causal), atol=2e-5)
    assert np.isfinite(run(100 * q, 100 * k, v, IDS, causal=causal)).all()
