"""AFT against log-space loops in float64: large keys, packed sequences, windows of all sizes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.aft import mix
from oracles.attention import Row
from oracles.segments import visibility

from flash_lm.ops import aft, aft_decode, aft_products
from flash_lm.ops.aft_bias import PositionBias, TapBias
from flash_lm.ops.aft_products import fits
from flash_lm.ops.segments import find_segments, whole_row

L, E, HEADS = 45, 6, 2
IDS = np.array([[1] * 10 + [0] * 3 + [2] * 20 + [1] * 12, [3] * L], np.int32)
INDEX = jnp.asarray(np.arange(L, dtype=np.int32)[None])


def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
    normal = np.random.default_rng(shape).normal(size=shape) * scale
    return normal.astype(np.float32)


def make_position_bias(window: int | None):
    """Returns the pair bias w as a PositionBias and as a function of (batch, head, t, u)."""
    u, v = draw(2, L, 3, scale=1.5), draw(3, L, 3)[:2]
    near = lambda t, other: window is None or abs(t - other) < window
    return PositionBias(INDEX, INDEX, window, jnp.asarray(u), jnp.asarray(v)), (
        lambda b, h, t, other: u[b, t].astype(float) @ v[b, other] if near(t, other) else 0.0
    )


def make_tap_bias(window: int, causal: bool):
    taps = draw(HEADS, window if causal else 2 * window - 1, scale=6.0)
    first = 0 if causal else window - 1
    return TapBias(INDEX, INDEX, window, jnp.asarray(taps)), (
        lambda b, h, t, other: float(taps[h, t - other + first]) if abs(t - other) < window else 0.0
    )


KINDS = ["simple", "full", "conv", *(f"window {n}" for n in (1, 8, 11, 60))]


def setting(kind: str, causal: bool, scale: float):
    """Returns keys, values, w for the library, and w for the oracle."""
    heads = HEADS if kind == "conv" else 1
    k = draw(2, heads, L, 1 if kind == "conv" else E, scale=scale)
    w = {"simple": lambda: (None, lambda b, h, t, u: 0.0), "full": lambda: make_position_bias(None)}
    w |= {"conv": lambda: make_tap_bias(5, causal)}
    bias, pair_bias = w[kind]() if kind in w else make_position_bias(int(kind.split()[1]))
    return k, draw(2, heads, L, E), bias, pair_bias


@functools.cache
def compile_aft(kind: str, causal: bool, blocks: str):
    """Compiles one kind for all keys; the block sizes are those set at the first call."""
    return jax.jit(lambda k, v, bias: aft.aft(k, v, find_segments(jnp.asarray(IDS)).runs_BxL, bias, causal=causal))


def uses_products(k, v, bias) -> bool:
    """Whether the keys are small enough for the form with matrix products."""
    return bool(jax.jit(fits)(k, v, bias))


scales = pytest.mark.parametrize(
    "scale", [pytest.param(1.0, marks=pytest.mark.slow("usual keys: large ones are harder")), 30.0]
)
slow_both_ways = [True, pytest.param(False, marks=pytest.mark.slow("the bidirectional form is the causal one twice"))]


def is_quick(kind: str, blocks: str, causal: bool) -> bool:
    """Whether a case is quick: each compiles a program, and the bidirectional form is the causal one twice."""
    return kind in KINDS and (causal or (blocks == "large" and kind in ("full", "window 8")))


@scales
@pytest.mark.parametrize(
    ("kind", "blocks", "causal"),
    [
        pytest.param(*case, marks=() if is_quick(*case) else pytest.mark.slow("compiles another program, see is_quick"))
        for case in itertools.product((*KINDS, "window 3", f"window {L}"), ("large", "small"), (True, False))
    ],
)
def test_values(kind, causal, blocks, scale, monkeypatch):
    if blocks == "small":  # so that each form has several blocks
        monkeypatch.setattr(aft, "QUERY_BLOCK", 4)
        monkeypatch.setattr(aft, "_SIMPLE_BLOCK", 4)
        monkeypatch.setattr(aft_products, "_BLOCK", 4)
    k, v, bias, w = setting(kind, causal, scale)
    assert uses_products(k, v, bias) is (scale == 1)
    out = np.asarray(compile_aft(kind, causal, blocks)(k, v, bias))
    for b, ids in enumerate(IDS.tolist()):
        row = Row(visibility(ids, causal), list(range(L)))
        for h in range(k.shape[1]):
            expected = mix(k[b, h].astype(float), v[b, h].astype(float), row, lambda t, u, b=b, h=h: w(b, h, t, u))
            np.testing.assert_allclose(out[b, h], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "packed", [True, pytest.param(False, marks=pytest.mark.slow("one document per sequence: a case of packed ones"))]
)
@pytest.mark.parametrize("causal", slow_both_ways, ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    "kind",
    [
        "full",
        *(
            pytest.param(name, marks=pytest.mark.slow("compiles both forms of another kind"))
            for name in ("simple", "window 11", "conv")
        ),
    ],
)
def test_both_forms_have_the_same_gradients(kind, causal, packed, monkeypatch):
    """Gradients of keys, values and w, in several blocks."""
    monkeypatch.setattr(aft_products, "_BLOCK", 8)
    k, v, bias, _ = setting(kind, causal, 1.0)
    runs = find_segments(jnp.asarray(IDS if packed else IDS[1:].repeat(2, 0) * (np.arange(L) < 40))).runs_BxL
    pull = draw(7, 2, *k.shape[1:3], E)[0]

    def gradients(*arguments):
        arrays, graph = jax.tree.flatten(arguments)
        floats = [x for x in arrays if x.dtype == jnp.float32]

        def loss(floats):
            left = iter(floats)
            k, v, bias = jax.tree.unflatten(graph, [next(left) if x.dtype == jnp.float32 else x for x in arrays])
            return (aft.aft(k, v, runs, bias, causal=causal, packed=packed) * pull).sum()

        return jax.jit(jax.value_and_grad(loss))(floats)

    arguments = (jnp.asarray(k), jnp.asarray(v), bias)
    assert uses_products(*arguments)
    products = gradients(*arguments)
    monkeypatch.setattr(aft, "fits", lambda k, v, bias: jnp.zeros((), bool))
    stable = gradients(*arguments)
    for a, b in zip(jax.tree.leaves(products), jax.tree.leaves(stable), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("kind", ["simple", "full", "window 8"])
def test_nan_is_not_hidden_and_does_not_reach_earlier_tokens(kind):
    run = jax.jit(lambda k, v, bias: aft.aft(k, v, whole_row(L).runs_BxL, bias, causal=True))
    for which in (0, 1):
        arrays = [*setting(kind, True, 1.0)[:2]]
        bias = setting(kind, True, 1.0)[2]
        arrays[which][:, :, 20] = np.nan
        assert not uses_products(*arrays, bias)
        out = np.asarray(run(*arrays, bias))
        assert np.isfinite(out[:, :, :20]).all() and np.isnan(out[:, :, 20:]).all()


def test_the_largest_key_and_the_largest_w_of_different_keys():
    """With both far apart, exp(K − max K) · exp(w − max w) would underflow and the mean be 0 / 0, so w is clipped."""
    k, v = draw(2, 1, L, E), draw(2, 1, L, E)
    u, key_bias = np.full((2, L, 1), 10.0, np.float32), draw(2, L, 1)
    k[:, :, 5::9], key_bias[:, 5::9] = 120.0, -10.0
    key_bias[:, 3::9] = 10.0
    bias = PositionBias(INDEX, INDEX, None, jnp.asarray(u), jnp.asarray(key_bias))
    runs = find_segments(jnp.asarray(IDS)).runs_BxL

    def loss(k, v, bias):
        out = aft.aft(k, v, runs, bias, causal=True)
        return (out**2).sum(), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(k, v, bias)
    assert all(np.isfinite(x).all() for x in grads)
    for b, ids in enumerate(IDS.tolist()):
        w = lambda t, u, b=b: float(np.clip(10.0 * key_bias[b, u, 0], -40, 40))
        row = Row(visibility(ids, True), list(range(L)))
        expected = mix(k[b, 0].astype(float), v[b, 0].astype(float), row, w)
        np.testing.assert_allclose(np.asarray(out)[b, 0], expected, rtol=0, atol=1e-5)


@scales
@pytest.mark.parametrize("kind", ["simple", "full", "window 8", "conv"])
def test_prefill_in_parts_is_the_parallel_form(kind, scale, monkeypatch):
    """Sequences at different positions, parts of any length, also empty; a capacity larger than the sequence."""
    for module in (aft, aft_decode):
        monkeypatch.setattr(module, "QUERY_BLOCK", 8)
    k, v, bias, _ = setting(kind, True, scale)
    parallel = jax.jit(lambda k, v, bias: aft.aft(k, v, jnp.ones((2, L), jnp.int32), bias, causal=True))
    expected = np.asarray(parallel(k, v, bias))

    def select_bias(queries, keys):
        if bias is None:
            return None
        if isinstance(bias, TapBias):
            return TapBias(queries, keys, bias.window, bias.taps_HxT)
        rows = jnp.arange(2)[:, None]
        u, v = (x[rows, p.clip(0, L - 1)] for x, p in ((bias.query_BxLxR, queries), (bias.key_BxMxR, keys)))
        return PositionBias(queries, keys, bias.window, u, v)

    heads, width = k.shape[1], k.shape[3]
    if kind == "full":
        empty = lambda n: jnp.zeros((2, heads, 64, n))
        state, consume = aft_decode.FullState(empty(width), empty(E)), aft_decode.prefill_full
    else:
        memory_length = bias.window - 1 if bias is not None else 0
        state, consume = aft_decode.init_window(2, heads, memory_length, width, E), aft_decode.prefill_window
    start = np.zeros(2, np.int32)
    consume = jax.jit(consume, static_argnums=5)
    for parts in ((13, 2), (0, 7), (1, 1), (17, 20), (1, 0), (12, 14), (1, 1)):
        lengths = np.array(parts, np.int32)
        size = 20 if max(parts) > 1 else 1  # two compiled shapes
        index = (start[:, None] + np.arange(size)).clip(0, L - 1)
        take = lambda x, index=index: np.take_along_axis(x, index[:, None, :, None], axis=2)
        out, state = consume(jnp.asarray(take(k)), jnp.asarray(take(v)), state, start, lengths, select_bias)
        for b, n in enumerate(parts):
            expected_part = expected[b, :, start[b] : start[b] + n]
            np.testing.assert_allclose(np.asarray(out)[b, :, :n], expected_part, rtol=0, atol=1e-5)
        start += lengths
    assert start.tolist() == [45, 45]
