"""Sums with a decay per channel against their recurrence in float64: values, derivatives, states, extreme gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.gla import recurrence

from flash_lm.ops.scalar_decay import decayed_sums
from flash_lm.ops.segments import find_segments
from flash_lm.ops.vector_decay import GatedInputs, gated_sums, longest_chunk, prefill_gated, step_gated
from ops.test_segments import LENGTH, random_ids

BATCH, HEADS, WIDTH, FLOOR = 3, 2, 4, -5.0
IDS = random_ids(5)[:BATCH]
RUNS = np.asarray(jax.jit(find_segments)(IDS).runs_BxL)
ONE = np.ones_like(RUNS)
KINDS = ("usual", "ends", "floor")
run = jax.jit(gated_sums, static_argnames="chunk_size")
prefill = jax.jit(prefill_gated, static_argnames="chunk_size")
step = jax.jit(step_gated)


def inputs(kind: str, length: int = LENGTH) -> tuple[GatedInputs, np.ndarray]:
    """Random inputs; each decay at one of its limits; all decays at the floor."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((BATCH, HEADS, length, width)) for width in (WIDTH, WIDTH, 3))
    log_decay = np.maximum(-random.exponential(0.2, k.shape), FLOOR)
    if kind == "ends":
        log_decay = random.choice((0.0, FLOOR), k.shape)
    if kind == "floor":
        log_decay = np.full(k.shape, FLOOR)
    *arguments, v = (x.astype(np.float32) for x in (q, k, log_decay, v))
    return GatedInputs(*arguments), v


def expected(arguments: GatedInputs, v: np.ndarray, runs: np.ndarray) -> np.ndarray:
    q, k, log_decay, v = (np.asarray(x, np.float64) for x in (*arguments, v))
    heads = [
        [recurrence(*(x[b, h] for x in (q, k, v, log_decay)), runs[b]) for h in range(v.shape[1])]
        for b in range(len(v))
    ]
    return np.array(heads)


def test_a_chunk_is_as_long_as_float32_allows():
    """At the floor a chunk decays by e^−80 at most; one token is always allowed."""
    assert [longest_chunk(floor) for floor in (-5.0, -1.0, -0.5, -80.0, -1000.0)] == [16, 80, 160, 1, 1]


@pytest.mark.parametrize("chunk_size", [1, 5, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, chunk_size):
    """In flash-linear-attention (#215, #122) chunks are inf or NaN with strong gates."""
    arguments, v = inputs(kind)
    actual = np.where(RUNS[:, None, :, None] > 0, run(arguments, v, RUNS, chunk_size=chunk_size), 0)
    np.testing.assert_allclose(actual, expected(arguments, v, RUNS), rtol=1e-5, atol=1e-5)


def test_one_decay_for_all_channels_is_a_decayed_sum():
    arguments, v = inputs("usual")
    log_decay = arguments.log_decay_BxHxLxK[..., :1]
    alike = arguments._replace(log_decay_BxHxLxK=np.broadcast_to(log_decay, arguments.k_BxHxLxK.shape))
    actual = run(alike, v, RUNS, chunk_size=8)
    sums = jax.jit(decayed_sums, static_argnames="chunk_size")
    same = sums(arguments.q_BxHxLxK, arguments.k_BxHxLxK, v, log_decay[..., 0], RUNS, chunk_size=8)
    np.testing.assert_allclose(actual, same, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["usual", "ends"])
@pytest.mark.parametrize("chunk_size", [5, 16])
def test_derivatives(kind, chunk_size):
    """Along random directions against differences of the recurrence, also by the decays."""
    random, shift = np.random.default_rng(2), 1e-6
    arguments, v = inputs(kind)
    out_weights = random.standard_normal(v.shape) * (RUNS > 0)[:, None, :, None]
    loss = lambda *x: (
        gated_sums(GatedInputs(*x[:3]), x[3], jnp.asarray(RUNS), chunk_size=chunk_size) * out_weights
    ).sum()
    # At the floor a sum of decays would be at its bound, where it has a corner.
    exact = [
        x.astype(np.float64) for x in (*arguments._replace(log_decay_BxHxLxK=0.99 * arguments.log_decay_BxHxLxK), v)
    ]
    grads = jax.jit(jax.grad(loss, argnums=range(4)))(*(jnp.asarray(x, jnp.float32) for x in exact))
    for i, grad in enumerate(grads):
        direction = random.standard_normal(exact[i].shape)
        shifted = [[x + sign * shift * direction if j == i else x for j, x in enumerate(exact)] for sign in (1, -1)]
        ends = [(expected(GatedInputs(*x[:3]), x[3], RUNS) * out_weights).sum() for x in shifted]
        difference = (ends[0] - ends[1]) / (2 * shift)
        np.testing.assert_allclose((np.asarray(grad) * direction).sum(), difference, rtol=1e-4, atol=1e-4)


def test_derivatives_at_the_floor_are_finite():
    """The product of a masked pair may reach e^80."""
    arguments, v = inputs("floor")
    loss = lambda *x: gated_sums(GatedInputs(*x[:3]), x[3], jnp.asarray(RUNS), chunk_size=16).sum()
    grads = jax.jit(jax.grad(loss, argnums=range(4)))(*arguments, v)
    assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_in_pieces(kind):
    """Prefill at any split and single steps give the same output; padding leaves the state unchanged."""
    arguments, v = inputs(kind)
    state, outs, start = np.zeros((BATCH, HEADS, WIDTH, 3), np.float32), [], 0
    for stop, padding in ((7, 3), (8, 0), (21, 2)):
        pads = [(0, 0), (0, 0), (0, padding), (0, 0)]
        *piece, values = (np.pad(x[:, :, start:stop], pads, constant_values=np.nan) for x in (*arguments, v))
        real = np.arange(stop - start + padding)[None] < np.full((BATCH, 1), stop - start)
        out, state = prefill(GatedInputs(*piece), values, state, real, chunk_size=8)
        outs.append(np.asarray(out)[:, :, : stop - start])
        start = stop
    for t in range(start, LENGTH):
        *token, value = (x[:, :, t : t + 1] for x in (*arguments, v))
        out, state = step(GatedInputs(*token), value, state)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=2), expected(arguments, v, ONE), rtol=1e-5, atol=1e-5)
