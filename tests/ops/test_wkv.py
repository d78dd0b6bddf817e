"""RWKV's WKV operator against pairs in float64: values, derivatives, states, and keys of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.segments import find_segments
from flash_lm.ops.wkv import Sums, prefill_wkv, wkv
from ops.test_segments import LENGTH, random_ids

BATCH, WIDTH = 3, 4
IDS = random_ids(5)[:BATCH]
RUNS = np.asarray(jax.jit(find_segments)(IDS).runs_BxL)
ONE = np.ones_like(RUNS)
run = jax.jit(wkv, static_argnames=("chunk_size", "causal"))
prefill = jax.jit(prefill_wkv, static_argnames="chunk_size")


def inputs(scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """Keys, values, decay rates from slow to so fast that only the last token counts, and the bonus u."""
    random = np.random.default_rng(0)
    k, v = random.standard_normal((2, BATCH, LENGTH, WIDTH))
    arrays = (scale * k, v, np.array([1e-3, 0.1, 2.0, 50.0]), random.standard_normal(WIDTH))
    return tuple(x.astype(np.float32) for x in arrays)


def expected(k, v, rate, bonus, runs: np.ndarray, causal: bool = True) -> np.ndarray:
    k, v, rate, bonus = (np.asarray(x, np.float64) for x in (k, v, rate, bonus))
    out, positions = np.zeros_like(v), np.arange(k.shape[1])
    for b, t in np.ndindex(*k.shape[:2]):
        visible = positions[(runs[b] == runs[b, t]) & (runs[b] > 0) & ((positions <= t) | (not causal))]
        if len(visible):
            decay = np.where((visible == t)[:, None], bonus, -(abs(t - visible)[:, None] - 1) * rate)
            logs = k[b, visible] + decay
            weights = np.exp(logs - logs.max(axis=0))
            out[b, t] = (weights * v[b, visible]).sum(axis=0) / weights.sum(axis=0)
    return out


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_values(scale, chunk_size, causal):
    """Also for keys at which exp overflows in float32."""
    arrays = inputs(scale)
    actual = run(*arrays, RUNS, chunk_size=chunk_size, causal=causal)
    np.testing.assert_allclose(actual, expected(*arrays, RUNS, causal), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("chunk_size", [5, 64])
def test_derivatives(chunk_size):
    """Along random directions against differences of the reference, also by rates and u."""
    random, step = np.random.default_rng(2), 1e-6
    exact = [x.astype(np.float64) for x in inputs()]
    out_weights = random.standard_normal(exact[1].shape)
    loss = lambda *x: (wkv(*x, jnp.asarray(RUNS), chunk_size=chunk_size, causal=True) * out_weights).sum()
    grads = jax.jit(jax.grad(loss, argnums=range(4)))(*(jnp.asarray(x, jnp.float32) for x in exact))
    for i, grad in enumerate(grads):
        direction = random.standard_normal(exact[i].shape)
        shifted = [[x + sign * step * direction if j == i else x for j, x in enumerate(exact)] for sign in (1, -1)]
        ends = [(expected(*x, RUNS) * out_weights).sum() for x in shifted]
        difference = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((np.asarray(grad) * direction).sum(), difference, rtol=1e-4, atol=1e-4)


def test_a_sequence_in_pieces():
    """Prefill at any split, also of no tokens, and single tokens; padding leaves the state unchanged."""
    k, v, rate, bonus = inputs()
    state, outs, start = Sums.nothing((BATCH, WIDTH)), [], 0
    for stop, padding in ((7, 3), (7, 4), (8, 0), (21, 2), *((t, 0) for t in range(22, LENGTH + 1))):
        pads = [(0, 0), (0, padding), (0, 0)]
        piece = (np.pad(x[:, start:stop], pads, constant_values=np.nan) for x in (k, v))
        real = np.arange(stop - start + padding)[None] < np.full((BATCH, 1), stop - start)
        out, state = prefill(*piece, rate, bonus, state, real, chunk_size=8)
        outs.append(np.asarray(out)[:, : stop - start])
        start = stop
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected(k, v, rate, bonus, ONE), rtol=1e-5, atol=1e-5)
