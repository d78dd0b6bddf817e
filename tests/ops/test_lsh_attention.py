"""LSH attention against loops: hashes, ranks, visible tokens, several rounds, gradients, memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.reformer import hashes, visible_pairs
from oracles.attention import Row
from oracles.segments import offsets, visibility

from flash_lm.ops.lsh_attention import hash_buckets, lsh_attention, permute, sorted_by_bucket, unit
from flash_lm.ops.segments import find_segments, whole_row
from ops.test_banded_softmax import array_sizes

BATCH, HEADS, LENGTH, WIDTH, ROUNDS, COUNT = 2, 2, 41, 8, 3, 4
# Padding first, between documents and last; a repeated id.
IDS = np.array([[0] * 2 + [5] * 17 + [0] * 3 + [5] * 12 + [2] * 4 + [0] * 3, [1] * 41], np.int32)
ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
causal_first = pytest.mark.parametrize(
    "causal",
    [True, pytest.param(False, marks=pytest.mark.slow("the other direction: the same code with another mask"))],
)


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, ...]:
    """Shared queries and keys, values, rotations."""
    random = np.random.default_rng(3)
    shape = (BATCH, HEADS, LENGTH, WIDTH)
    shapes = (shape, shape, (ROUNDS, WIDTH, COUNT // 2))
    return tuple(random.normal(size=one).astype(np.float32) for one in shapes)


def attend(x, v, rotations, window: int, causal: bool, ids=IDS):
    by_bucket = sorted_by_bucket(hash_buckets(x, rotations), find_segments(jnp.asarray(ids)).runs_BxL, COUNT, window)
    return lsh_attention(x, unit(x), v, by_bucket, window=window, causal=causal)


def loops(x, v, rotations, window: int, causal: bool) -> np.ndarray:
    """Softmax over the set of visible tokens; zeros without any."""
    x, v, rotations = (array.astype(np.float64) for array in (x, v, rotations))
    out = np.zeros_like(v)
    for b, h in np.ndindex(BATCH, HEADS):
        row = Row(visibility(IDS[b].tolist(), causal), offsets(IDS[b].tolist()))
        sees = visible_pairs(x[b, h], rotations, row, window)
        for t in range(LENGTH):
            keys = np.flatnonzero(sees[t])
            weights = np.exp([x[b, h, t] @ x[b, h, u] / np.linalg.norm(x[b, h, u]) for u in keys])
            out[b, h, t] = weights @ v[b, h, keys] / max(weights.sum(), 1e-300)
    return out


def test_hashes(arrays):
    """Equal to those of the loops, independent of the norm of the vectors, and all hashes occur."""
    x, _, rotations = arrays
    actual = np.asarray(hash_buckets(jnp.asarray(x), jnp.asarray(rotations)))
    for b, h in np.ndindex(BATCH, HEADS):
        expected, margin = hashes(x[b, h].astype(np.float64), rotations.astype(np.float64))
        assert margin > 1e-4, "draw other numbers: rounding might decide"
        np.testing.assert_array_equal(actual[b, h], expected)
    assert set(actual.ravel()) == set(range(COUNT))
    np.testing.assert_array_equal(hash_buckets(jnp.asarray(100 * x), jnp.asarray(rotations)), actual)


def test_hashes_are_computed_in_float32_at_the_highest_precision(arrays):
    """Also for bfloat16 inputs: rounded operands on a GPU or TPU would move tokens to other buckets."""
    x, _, rotations = map(jnp.asarray, arrays)
    program = jax.make_jaxpr(hash_buckets)(x.astype(jnp.bfloat16), rotations)
    (product,) = [equation for equation in program.jaxpr.eqns if equation.primitive.name == "dot_general"]
    assert {var.aval.dtype.name for var in product.invars} == {"float32"}
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize(
    "window", [5, 1000, *(pytest.param(n, marks=pytest.mark.slow("another window: the same code")) for n in (1, 2, 41))]
)
@ways
def test_it_is_softmax_over_the_set_of_visible_tokens(causal, window, arrays):
    """The length is no multiple of the window; a pair in several rounds counts once; padding gets zeros."""
    np.testing.assert_allclose(
        jax.jit(attend, static_argnums=(3, 4))(*arrays, window, causal), loops(*arrays, window, causal), atol=2e-6
    )


def test_the_pairs_of_several_rounds_are_many(arrays):
    """So the test above would notice if they counted more than once."""
    x, _, rotations = arrays
    row = Row(visibility([1] * LENGTH, True), list(range(LENGTH)))
    alone = [visible_pairs(x[0, 0], rotation[None], row, 5) for rotation in rotations]
    assert (np.sum(alone, axis=0) > 1).sum() > 20


@causal_first
def test_gradients_are_those_of_the_loops(causal, arrays):
    x, v, rotations = arrays
    random = np.random.default_rng(4)
    weights = random.normal(size=v.shape)
    gradients = jax.jit(jax.grad(lambda x, v: (attend(x, v, rotations, 5, causal) * weights).sum(), argnums=(0, 1)))(
        x, v
    )
    directions = [random.normal(size=v.shape) for _ in gradients]
    losses = (
        (
            loops(
                *(a + step * direction for a, direction in zip((x, v), directions, strict=True)), rotations, 5, causal
            )
            * weights
        ).sum()
        for step in (1e-6, -1e-6)
    )
    slope = (next(losses) - next(losses)) / 2e-6
    np.testing.assert_allclose(
        sum((g * direction).sum() for g, direction in zip(gradients, directions, strict=True)), slope, rtol=1e-4
    )


def test_vectors_of_zeros_have_finite_gradients(arrays):
    """‖0‖ has no derivative, and a norm may output zeros."""
    x, v, rotations = arrays
    x = np.where(np.arange(LENGTH)[:, None] % 3 == 0, 0, x)
    out, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.square(attend(x, v, rotations, 5, True)).sum()))(x)
    assert np.isfinite(out) and np.isfinite(gradient).all() and np.abs(gradient).max() > 0
    np.testing.assert_allclose(np.linalg.norm(unit(jnp.asarray(x)), axis=-1), np.abs(x).max(axis=-1) > 0, rtol=1e-6)


@causal_first
def test_bfloat16_with_the_same_hashes(causal, arrays):
    """With equal hashes the error is that of bfloat16; only hashes of tokens near a border may differ."""
    x, v, rotations = map(jnp.asarray, arrays)
    runs_BxL = jax.jit(find_segments)(IDS).runs_BxL
    by_bucket = jax.jit(lambda x: sorted_by_bucket(hash_buckets(x, rotations), runs_BxL, COUNT, 5))(x)
    run = jax.jit(lambda q, v: lsh_attention(q, unit(q), v, by_bucket, window=5, causal=causal).astype(jnp.float32))
    exact, rounded = (
        np.asarray(run(q, values)) for q, values in ((x, v), (x.astype(jnp.bfloat16), v.astype(jnp.bfloat16)))
    )
    assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 2e-2


def test_the_gradient_of_a_permutation_is_its_inverse():
    x = jnp.arange(24.0).reshape(1, 2, 4, 3)
    order = jnp.array([[[2, 0, 3, 1], [1, 3, 0, 2]]])
    inverse = jnp.argsort(order, axis=-1)
    out, back = jax.vjp(lambda x: permute(x, order, inverse), x)
    for h in range(2):
        np.testing.assert_array_equal(out[0, h], x[0, h][order[0, h]])
    np.testing.assert_array_equal(back(out)[0], x)


def test_memory_grows_with_the_length():
    """Twice the length doubles the largest array; no array has an entry per pair."""
    largest = {}
    for length in (1024, 2048):
        array = jax.ShapeDtypeStruct((1, 1, length, WIDTH), jnp.float32)

        def loss(x, v):
            rotations = jnp.ones((2, WIDTH, COUNT // 2))
            by_bucket = sorted_by_bucket(hash_buckets(x, rotations), whole_row(x.shape[2]).runs_BxL, COUNT, 16)
            return lsh_attention(x, unit(x), v, by_bucket, window=16, causal=True).sum()

        largest[length] = max(array_sizes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(array, array).jaxpr))
    assert largest[2048] == 2 * largest[1024] <= 2048 * math.prod((2, 2, 16))
