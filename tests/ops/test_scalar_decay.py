"""Chunked decayed sums against the recurrence in float64: values, derivatives, states, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.decayed import recurrence

from flash_lm.ops import chunks
from flash_lm.ops.linear_attention import linear_sums
from flash_lm.ops.log_decay import decay_between, running
from flash_lm.ops.scalar_decay import decayed_sums, prefill_decayed, step_decayed
from flash_lm.ops.segments import find_segments
from ops.test_segments import LENGTH, random_ids

BATCH, HEADS, CHUNK = 4, 3, 8
IDS = random_ids(3)
RUNS = np.asarray(jax.jit(find_segments)(IDS).runs_BxL)
DECAYS = {  # log decay per head
    "none": (0.0, 0.0, 0.0),
    "usual": (-0.01, -0.3, -2.0),
    "ends": (0.0, -80.0, -1e4),
}
run = jax.jit(decayed_sums, static_argnames=("chunk_size", "causal"))
prefill = jax.jit(prefill_decayed, static_argnames="chunk_size")
step = jax.jit(step_decayed)


@pytest.fixture(scope="module")
def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((BATCH, HEADS, LENGTH, width)).astype(np.float32) for width in (3, 3, 2)]


def decays(kind: str) -> np.ndarray:
    """Log decays, B×H×L: those of the kind, scaled by a random factor per token."""
    shares = np.random.default_rng(1).uniform(0, 2, (BATCH, HEADS, LENGTH))
    return (np.array(DECAYS[kind])[:, None] * shares).astype(np.float32)


def expected_output(arrays, log_decay, runs) -> np.ndarray:
    arrays = [x.astype(np.float64) for x in (*arrays, log_decay)]
    rows = [[recurrence(*(x[b, h] for x in arrays), runs[b]) for h in range(HEADS)] for b in range(len(runs))]
    return np.array(rows)


@pytest.mark.parametrize("chunk_size", [1, 5, CHUNK, 64])
def test_both_directions(chunk_size, arrays):
    """The weight of a pair has the decays of all tokens after the earlier one, up to the later one."""
    q, k, v, log_decay = (x.astype(np.float64) for x in (*arrays, decays("usual")))
    expected = np.zeros(v.shape)
    for b, h, t, u in np.ndindex(*v.shape[:3], LENGTH):
        if RUNS[b, t] == RUNS[b, u] > 0:
            weight = np.exp(log_decay[b, h, min(t, u) + 1 : max(t, u) + 1].sum())
            expected[b, h, t] += weight * (q[b, h, t] @ k[b, h, u]) * v[b, h, u]
    actual = run(*arrays, decays("usual"), RUNS, chunk_size=chunk_size, causal=False)
    np.testing.assert_allclose(np.where(RUNS[:, None, :, None] > 0, actual, 0), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 5, CHUNK, 64])
@pytest.mark.parametrize("kind", DECAYS)
def test_values(kind, chunk_size, arrays):
    actual = run(*arrays, decays(kind), RUNS, chunk_size=chunk_size)
    expected = expected_output(arrays, decays(kind), RUNS)
    np.testing.assert_allclose(np.where(RUNS[:, None, :, None] > 0, actual, 0), expected, rtol=1e-5, atol=1e-5)


def test_groups_of_chunks(arrays, monkeypatch):
    """Sums also decay from group to group."""
    monkeypatch.setattr(chunks, "_GROUP", 3)
    actual = jax.jit(lambda *x: decayed_sums(*x, chunk_size=2))(*arrays, decays("usual"), RUNS)
    expected = expected_output(arrays, decays("usual"), RUNS)
    np.testing.assert_allclose(np.where(RUNS[:, None, :, None] > 0, actual, 0), expected, rtol=1e-5, atol=1e-5)


def test_one_decay_for_all_tokens(arrays):
    rates = np.array(DECAYS["usual"], np.float32)[None, :, None]
    output = run(*arrays, rates, RUNS, chunk_size=CHUNK)
    per_token = np.broadcast_to(rates, (BATCH, HEADS, LENGTH))
    np.testing.assert_allclose(output, run(*arrays, per_token, RUNS, chunk_size=CHUNK), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [5, 64])
def test_derivatives(chunk_size, arrays):
    """Along random directions against differences of the recurrence, also by the decays."""
    random, shift = np.random.default_rng(2), 1e-6
    out_weights = random.standard_normal((BATCH, HEADS, LENGTH, 2)) * (RUNS > 0)[:, None, :, None]
    inputs = [x.astype(np.float64) for x in (*arrays, decays("usual"))]
    loss = lambda *x: (decayed_sums(*x, jnp.asarray(RUNS), chunk_size=chunk_size) * out_weights).sum()
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*(jnp.asarray(x, jnp.float32) for x in inputs))
    for i, grad in enumerate(grads):
        direction = random.standard_normal(inputs[i].shape)
        shifted = [[x + sign * shift * direction if j == i else x for j, x in enumerate(inputs)] for sign in (1, -1)]
        ends = [(expected_output(x[:3], x[3], RUNS) * out_weights).sum() for x in shifted]
        np.testing.assert_allclose(
            (np.asarray(grad) * direction).sum(), (ends[0] - ends[1]) / (2 * shift), rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow("compiles two operators; their values are compared with loops in quick tests")
def test_without_decay_it_equals_unnormalised_linear_attention(arrays):
    """Equal to the bit, as the weights are exactly one."""
    actual = decayed_sums(*map(jnp.asarray, arrays), jnp.zeros((1, HEADS, 1)), jnp.asarray(RUNS), chunk_size=CHUNK)
    q, k, v = (jnp.asarray(x.reshape(-1, *x.shape[2:])) for x in arrays)
    segments = find_segments(jnp.asarray(IDS))
    expected = linear_sums(q, k, v, segments, chunk_size=CHUNK, causal=True, packed=True)
    real = np.repeat(RUNS > 0, HEADS, axis=0)[..., None]
    np.testing.assert_array_equal(np.where(real, actual.reshape(expected.shape), 0), np.where(real, expected, 0))


@pytest.mark.parametrize("kind", DECAYS)
def test_a_sequence_in_pieces(kind, arrays):
    """Prefill at any split and single steps give the same output; padding leaves the state unchanged."""
    log_decay, one = decays(kind), np.ones((BATCH, LENGTH), np.int32)
    expected = expected_output(arrays, log_decay, one)
    state, outs, start = np.zeros((BATCH, HEADS, 3, 2), np.float32), [], 0
    for stop, padding in ((7, 3), (8, 0), (21, 2)):
        piece = [
            np.pad(x[:, :, start:stop], [(0, 0), (0, 0), (0, padding), (0, 0)], constant_values=np.nan) for x in arrays
        ]
        decay = np.pad(log_decay[:, :, start:stop], [(0, 0), (0, 0), (0, padding)], constant_values=np.nan)
        real = np.arange(stop - start + padding)[None] < np.full((BATCH, 1), stop - start)
        out, state = prefill(*piece, decay, state, real, chunk_size=CHUNK)
        outs.append(np.asarray(out)[:, :, : stop - start])
        start = stop
    for t in range(start, LENGTH):
        out, state = step(*(x[:, :, t : t + 1] for x in (*arrays, log_decay)), state)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=2), expected, rtol=1e-5, atol=1e-5)


def test_near_tokens_are_exact_after_much_was_forgotten():
    """The difference of two large sums would lose its digits; see `log_decay`."""
    logs = np.full(512, -20.0)
    logs[1::2] = -np.random.default_rng(3).uniform(0, 1, 256)
    sums = running(jnp.asarray(logs, jnp.float32))
    actual = decay_between(sums.at(lambda x: x[1:]), sums.at(lambda x: x[:-1]), jnp.ones(511, bool))
    np.testing.assert_allclose(actual, np.exp(logs[1:].astype(np.float32).astype(np.float64)), rtol=1e-6)


def test_residuals_of_the_derivative():
    """It keeps inputs and one sum per chunk, but no weights of pairs."""
    length, size, width = 512, 32, 4
    q, k, v = (jnp.ones((1, 1, length, width)) for _ in range(3))
    sums = lambda *x: decayed_sums(*x, jnp.ones((1, length), jnp.int32), chunk_size=size)
    residuals = jax.eval_shape(lambda *x: jax.vjp(sums, *x)[1], q, k, v, jnp.full((1, 1, length), -0.1))
    leaves = jax.tree.leaves(residuals)
    assert max(leaf.size for leaf in leaves) <= length * max(width, width**2 // size, 1)
