"""The chunked delta rule against its recurrence in float64: values, derivatives, states, and hard cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.gated_deltanet import recurrence

from flash_lm.ops.delta_rule import DeltaInputs, delta_rule, prefill_delta, step_delta
from flash_lm.ops.scalar_decay import decayed_sums
from flash_lm.ops.segments import find_segments
from ops.test_segments import LENGTH, random_ids

BATCH, HEADS, WIDTH = 3, 2, 4
IDS = random_ids(5)[:BATCH]
RUNS = np.asarray(jax.jit(find_segments)(IDS).runs_BxL)
ONE = np.ones_like(RUNS)
KINDS = ("usual", "delta", "ends", "equal_keys")
run = jax.jit(delta_rule, static_argnames="chunk_size")
prefill = jax.jit(prefill_delta, static_argnames="chunk_size")
step = jax.jit(step_delta)


def inputs(kind: str, length: int = LENGTH) -> tuple[DeltaInputs, np.ndarray]:
    """Random inputs; without decay; decays and β at their limits; one key for all tokens with β = 1."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((BATCH, HEADS, length, width)) for width in (WIDTH, WIDTH, 3))
    k = np.ones_like(k) if kind == "equal_keys" else k
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, beta = -random.exponential(0.2, v.shape[:3]), random.uniform(size=v.shape[:3])
    if kind == "ends":
        log_decay, beta = (random.choice(ends, v.shape[:3]) for ends in ((0.0, -80.0, -1e4), (0.0, 1.0)))
    if kind in ("delta", "equal_keys"):
        log_decay = np.zeros_like(log_decay)
    if kind == "equal_keys":
        beta = np.ones_like(beta)
    *arguments, v = (x.astype(np.float32) for x in (q, k, log_decay, beta, v))
    return DeltaInputs(*arguments), v


def expected(arguments: DeltaInputs, v: np.ndarray, runs: np.ndarray) -> np.ndarray:
    q, k, log_decay, beta, v = (np.asarray(x, np.float64) for x in (*arguments, v))
    heads = [
        [recurrence(*(x[b, h] for x in (q, k, v, log_decay, beta)), runs[b]) for h in range(v.shape[1])]
        for b in range(len(v))
    ]
    return np.array(heads)


@pytest.mark.parametrize("chunk_size", [1, 5, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, chunk_size):
    arguments, v = inputs(kind)
    actual = np.where(RUNS[:, None, :, None] > 0, run(arguments, v, RUNS, chunk_size=chunk_size), 0)
    np.testing.assert_allclose(actual, expected(arguments, v, RUNS), rtol=1e-5, atol=1e-5)


def test_equal_keys_in_a_full_chunk():
    """Powers of the matrix reach 5e17; with β = 1 each token replaces the previous value."""
    arguments, v = inputs("equal_keys", 128)
    actual = run(arguments, v, np.ones((BATCH, 128), np.int32), chunk_size=64)
    reads = (arguments.q_BxHxLxK * arguments.k_BxHxLxK).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(actual, reads * v, rtol=1e-4, atol=1e-4)


def test_orthogonal_keys_are_a_decayed_sum():
    """No stored value has to be replaced."""
    arguments, v = inputs("usual", WIDTH)
    k = np.broadcast_to(np.eye(WIDTH, dtype=np.float32), arguments.k_BxHxLxK.shape)
    runs = np.ones((BATCH, WIDTH), np.int32)
    actual = run(arguments._replace(k_BxHxLxK=k), v, runs, chunk_size=2)
    same = jax.jit(decayed_sums, static_argnames="chunk_size")(
        arguments.q_BxHxLxK, k, arguments.beta_BxHxL[..., None] * v, arguments.log_decay_BxHxL, runs, chunk_size=2
    )
    np.testing.assert_allclose(actual, same, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [5, 64])
def test_derivatives(chunk_size):
    """Along random directions against differences of the recurrence, also by decays and β."""
    random, shift = np.random.default_rng(2), 1e-6
    arguments, v = inputs("usual")
    out_weights = random.standard_normal(v.shape) * (RUNS > 0)[:, None, :, None]
    loss = lambda *x: (
        delta_rule(DeltaInputs(*x[:4]), x[4], jnp.asarray(RUNS), chunk_size=chunk_size) * out_weights
    ).sum()
    exact = [x.astype(np.float64) for x in (*arguments, v)]
    grads = jax.jit(jax.grad(loss, argnums=range(5)))(*(jnp.asarray(x, jnp.float32) for x in exact))
    for i, grad in enumerate(grads):
        direction = random.standard_normal(exact[i].shape)
        shifted = [[x + sign * shift * direction if j == i else x for j, x in enumerate(exact)] for sign in (1, -1)]
        ends = [(expected(DeltaInputs(*x[:4]), x[4], RUNS) * out_weights).sum() for x in shifted]
        difference = (ends[0] - ends[1]) / (2 * shift)
        np.testing.assert_allclose((np.asarray(grad) * direction).sum(), difference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_in_pieces(kind):
    """Prefill at any split and single steps give the same output; padding leaves the state unchanged."""
    arguments, v = inputs(kind)
    state, outs, start = np.zeros((BATCH, HEADS, WIDTH, 3), np.float32), [], 0
    for stop, padding in ((7, 3), (8, 0), (21, 2)):
        pads = [(0, 0), (0, 0), (0, padding), (0, 0)]
        *piece, values = (np.pad(x[:, :, start:stop], pads[: x.ndim], constant_values=np.nan) for x in (*arguments, v))
        real = np.arange(stop - start + padding)[None] < np.full((BATCH, 1), stop - start)
        out, state = prefill(DeltaInputs(*piece), values, state, real, chunk_size=8)
        outs.append(np.asarray(out)[:, :, : stop - start])
        start = stop
    for t in range(start, LENGTH):
        *token, value = (x[:, :, t : t + 1] for x in (*arguments, v))
        out, state = step(DeltaInputs(*token), value, state)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=2), expected(arguments, v, ONE), rtol=1e-5, atol=1e-5)
