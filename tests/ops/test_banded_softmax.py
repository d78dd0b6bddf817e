"""Softmax over windows against float64 loops: values, log-sums, derivatives, merged parts, and memory."""

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from oracles.segments import visibility

from flash_lm.ops import blocked_attention
from flash_lm.ops.banded_softmax import (
    SoftmaxPart,
    banded_softmax,
    choose_stretches,
    fold_dilation,
    fold_key_span,
    merge_softmaxes,
    unfold_dilation,
    windowed_softmax,
)
from flash_lm.ops.segments import find_segments, whole_row
from flash_lm.ops.visibility import KeySpan, document_key_span
from ops.test_segments import LENGTH, random_ids

BATCH, HEADS, WINDOW, SCALE = 4, 2, 6, 0.7
IDS = random_ids(7)
forms = pytest.mark.parametrize("blocked", [False, True], ids=["plain", "blocked"])
another_span = pytest.mark.slow("another window or number of earlier keys: the same code")
ways = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_ways"])


@pytest.fixture(scope="module")
def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((BATCH, HEADS, LENGTH, width)).astype(np.float32) for width in (3, 3, 2)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Function that sets blocks of four tokens if its argument is true."""

    def shrink(blocked: bool) -> None:
        if blocked:
            monkeypatch.setattr(blocked_attention, "SMALLEST", 4)
            monkeypatch.setattr(blocked_attention, "LARGEST", 4)

    return shrink


def loops(arrays, sees: Callable[[int, int, int, int], bool], bias=lambda h, distance: 0.0):
    """Output and log-sum in float64 for sees(batch, head, query, key); the log-sum is NaN without visible keys."""
    q, k, v = (x.astype(np.float64) for x in arrays)
    out, log_sum = np.zeros(v.shape), np.full(v.shape[:3], np.nan)
    for b, h, t in np.ndindex(*v.shape[:3]):
        keys = [u for u in range(k.shape[2]) if sees(b, h, t, u)]
        if keys:
            powers = [math.exp(SCALE * (q[b, h, t] @ k[b, h, u]) + bias(h, u - t)) for u in keys]
            out[b, h, t] = sum(p * v[b, h, u] for p, u in zip(powers, keys, strict=True)) / sum(powers)
            log_sum[b, h, t] = math.log(sum(powers))
    return out, log_sum


def window_visibility(causal: bool, window: int = WINDOW) -> Callable[[int, int, int, int], bool]:
    same_document = [visibility(ids.tolist(), False) for ids in IDS]
    return lambda b, h, t, u: same_document[b](t, u) and abs(t - u) < window and (not causal or u <= t)


def make_key_span(causal: bool, window=WINDOW) -> KeySpan:
    return document_key_span(find_segments(jnp.asarray(IDS)), causal=causal, window=window)


def assert_part_equal(part: SoftmaxPart, expected) -> None:
    out, log_sum = expected
    np.testing.assert_allclose(part.out_BxHxLxE, out, rtol=1e-5, atol=1e-5)
    empty = np.isnan(log_sum)
    np.testing.assert_allclose(np.asarray(part.log_sum_BxHxL)[~empty], log_sum[~empty], rtol=1e-5, atol=1e-5)
    assert (np.asarray(part.log_sum_BxHxL)[empty] < -1e28).all()


@forms
@ways
def test_values(causal, blocked, arrays, small_blocks):
    small_blocks(blocked)
    run = jax.jit(lambda *x: banded_softmax(*x, make_key_span(causal), scale=SCALE, window=WINDOW))
    assert_part_equal(run(*arrays), loops(arrays, window_visibility(causal)))


@forms
def test_bias_per_head(blocked, arrays, small_blocks):
    """A bias that hides distant keys gives each head its window."""
    small_blocks(blocked)
    slopes, reach = (0.1, 0.3), (2.0, 5.0)

    def bias(distance: jax.Array) -> jax.Array:
        back = jnp.abs(distance).astype(jnp.float32)
        return jnp.stack([jnp.where(back < r, -slope * back, -1e30) for slope, r in zip(slopes, reach, strict=True)])

    run = jax.jit(lambda *x: banded_softmax(*x, make_key_span(True), scale=SCALE, window=WINDOW, bias=bias))
    near = window_visibility(True)
    sees = lambda b, h, t, u: near(b, h, t, u) and t - u < reach[h]
    assert_part_equal(run(*arrays), loops(arrays, sees, lambda h, distance: -slopes[h] * abs(distance)))


@forms
@ways
def test_derivatives(causal, blocked, arrays, small_blocks):
    """Derivatives of output and log-sum, also by the bias, along random directions against differences of the loops."""
    small_blocks(blocked)
    random = np.random.default_rng(1)
    table = random.standard_normal((HEADS, 2 * WINDOW - 1))
    out_weights, sum_weights = (
        random.standard_normal((BATCH, HEADS, LENGTH, 2)),
        random.standard_normal((BATCH, HEADS, LENGTH)),
    )
    sum_weights *= (IDS > 0)[:, None]  # padding has no log-sum

    def weighted_sum(q, k, v, table):
        bias = lambda distance: table[:, (distance + WINDOW - 1).clip(0, 2 * WINDOW - 2)]
        part = banded_softmax(q, k, v, make_key_span(causal), scale=SCALE, window=WINDOW, bias=bias)
        return (part.out_BxHxLxE * out_weights).sum() + jnp.where(
            sum_weights != 0, part.log_sum_BxHxL * sum_weights, 0
        ).sum()

    def expected(q, k, v, table) -> float:
        out, log_sum = loops((q, k, v), window_visibility(causal), lambda h, distance: table[h, distance + WINDOW - 1])
        return (out * out_weights).sum() + np.nansum(log_sum * sum_weights)

    inputs = [x.astype(np.float64) for x in (*arrays, table)]
    grads = jax.jit(jax.grad(weighted_sum, argnums=(0, 1, 2, 3)))(*(x.astype(np.float32) for x in inputs))
    for i, grad in enumerate(grads):
        direction, step = random.standard_normal(inputs[i].shape), 1e-6
        shifted = [[x + sign * step * direction if j == i else x for j, x in enumerate(inputs)] for sign in (1, -1)]
        difference = (expected(*shifted[0]) - expected(*shifted[1])) / (2 * step)
        np.testing.assert_allclose((np.asarray(grad) * direction).sum(), difference, rtol=1e-4, atol=1e-4)


@forms
def test_joined_parts_are_one_softmax(blocked, arrays, small_blocks):
    """The window, and the first tokens of each document outside it."""
    small_blocks(blocked)
    first = 3

    @jax.jit
    def run(*inputs):
        full_span, near = make_key_span(True, None), make_key_span(True)
        start = full_span.first_BxL
        ahead = KeySpan(full_span.index_BxL, start, jnp.clip(start + first, start, jnp.maximum(near.first_BxL, start)))
        parts = [
            banded_softmax(*inputs, near, scale=SCALE, window=WINDOW),
            banded_softmax(*inputs, ahead, scale=SCALE, window=None),
        ]
        return merge_softmaxes(parts)

    same_document = [visibility(ids.tolist(), True) for ids in IDS]

    def sees(b: int, h: int, t: int, u: int) -> bool:
        begin = min((x for x in range(LENGTH) if same_document[b](t, x)), default=0)
        return same_document[b](t, u) and (t - u < WINDOW or u - begin < first)

    out, _ = loops(arrays, sees)
    np.testing.assert_allclose(run(*arrays), out, rtol=1e-5, atol=1e-5)


@forms
@ways
@pytest.mark.parametrize("dilation", [2, 3])
def test_dilated_window(dilation, causal, blocked, arrays, small_blocks):
    small_blocks(blocked)
    reach = (WINDOW - 1) * dilation + 1

    @jax.jit
    def run(*inputs):
        key_span = fold_key_span(make_key_span(causal, reach), dilation, BATCH)
        folded = (fold_dilation(x, dilation) for x in inputs)
        out, sums = banded_softmax(*folded, key_span, scale=SCALE, window=WINDOW)
        return [unfold_dilation(x, dilation, LENGTH) for x in (out, sums[..., None])]

    out, sums = run(*map(jnp.asarray, arrays))
    near = window_visibility(causal, reach)
    sees = lambda b, h, t, u: near(b, h, t, u) and (t - u) % dilation == 0
    assert_part_equal(SoftmaxPart(out, np.asarray(sums)[..., 0]), loops(arrays, sees))


@ways
@pytest.mark.parametrize("window", [pytest.param(1, marks=another_span), 3, 9])
@pytest.mark.parametrize("ahead", [0, pytest.param(2, marks=another_span), 5, pytest.param(20, marks=another_span)])
def test_long_sequences_are_cut_into_stretches(window, causal, ahead, monkeypatch):
    """Values and derivatives equal those without the cut, also with a partial stretch and keys before the queries."""
    length = 167
    random = np.random.default_rng(2)
    shapes = [(2, HEADS, n, width) for n, width in ((length, 3), (ahead + length, 3), (ahead + length, 2), (length, 2))]
    q, k, v, out_weights = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)
    sum_weights = jnp.asarray(random.standard_normal((2, HEADS, length)), jnp.float32)
    documents = np.concatenate([np.repeat([1, 2, 3], [ahead + 40, 80, 47]), np.repeat([1, 2, 0], [ahead + 93, 60, 14])])
    find_span = jax.jit(lambda ids: document_key_span(find_segments(ids), causal=causal, window=window))
    full_span = find_span(documents.reshape(2, -1))
    key_span = KeySpan(*(np.broadcast_to(x, (2, ahead + length))[:, ahead:] for x in full_span))
    real = (key_span.count() > 0)[:, None]

    def loss(attend: Callable[..., SoftmaxPart], q, k, v):
        out, log_sum = attend(q, k, v, key_span, scale=SCALE, window=window)
        return (out * out_weights).sum() + jnp.where(real, log_sum * sum_weights, 0).sum(), (out, log_sum)

    def value_and_gradients(attend: Callable[..., SoftmaxPart]):
        return jax.jit(jax.value_and_grad(lambda *x: loss(attend, *x), argnums=(0, 1, 2), has_aux=True))(q, k, v)

    expected = value_and_gradients(banded_softmax)
    monkeypatch.setattr(blocked_attention, "SMALLEST", 4)
    monkeypatch.setattr(blocked_attention, "LARGEST", 4)
    assert choose_stretches(length, ahead + length, window).count > 1  # type: ignore
    for one, other in zip(
        jax.tree.leaves(value_and_gradients(windowed_softmax)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_short_sequence_is_not_cut():
    assert choose_stretches(1024, 1024, 128) is None
    assert choose_stretches(8192, 8192, 128).count == 8  # type: ignore


def test_the_window_may_differ_by_layer(arrays, small_blocks):
    """The window is a traced number: one program serves all windows."""
    small_blocks(True)
    run = jax.jit(
        lambda window: banded_softmax(
            *map(jnp.asarray, arrays), make_key_span(True, window), scale=SCALE, window=WINDOW
        )
    )
    for window in (1, 3, WINDOW):
        assert_part_equal(run(jnp.int32(window)), loops(arrays, window_visibility(True, window)))


def array_sizes(jaxpr) -> Iterator[int]:
    """Yields the sizes of all arrays in a program, loop bodies included."""
    for equation in jaxpr.eqns:
        yield from (math.prod(var.aval.shape) for var in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from array_sizes(inner)


def visited_pairs(length: int, window: int) -> int:
    """Counts the pairs of tokens in visited blocks."""
    size = blocked_attention.block_size(length, window)
    index = np.arange(-(-length // size) * size, dtype=np.int32)[None]
    key_span = KeySpan(*(x.reshape(-1, 1, size) for x in (index, np.maximum(index - window + 1, 0), index + 1)))
    first, stop = map(np.asarray, jax.jit(blocked_attention.blocks_seen)(key_span))
    return int((stop - first).sum()) * size**2


def test_memory_and_work_grow_with_the_window_not_the_length():
    window, largest = 128, {}
    for length in (1024, 2048, 8192):
        array = jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)

        def loss(q, k, v, length=length):
            key_span = document_key_span(whole_row(length), causal=True, window=window)
            return banded_softmax(q, k, v, key_span, scale=1.0, window=window).out_BxHxLxE.sum()

        program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(array, array, array)
        largest[length] = max(array_sizes(program.jaxpr))
    assert largest[8192] <= 8 * max(largest[1024], window**2)
    assert visited_pairs(8192, window) / 8192 < 1.1 * visited_pairs(1024, window) / 1024
    assert visited_pairs(8192, window) < 2.1 * 8192 * window
