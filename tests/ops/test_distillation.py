"""Cross entropy with a teacher against float64 NumPy, its gradient against finite differences of that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.ops.cross_entropy import cross_entropy
from flash_lm.ops.distillation import distillation

BATCH, LENGTH, DIM, TEACHER_DIM, WORDS, FACTOR = 2, 7, 4, 3, 11, 2.5


def draw():
    """Features and tables of both models, targets and weights."""
    rng = np.random.default_rng(0)
    shapes = (BATCH, LENGTH, DIM), (WORDS, DIM), (BATCH, LENGTH, TEACHER_DIM), (WORDS, TEACHER_DIM)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weights = rng.integers(0, 2, (BATCH, LENGTH)).astype(np.float32) * 0.5
    return *arrays, rng.integers(WORDS, size=(BATCH, LENGTH)).astype(np.int32), weights


def reference(features, table, teacher_features, teacher_table, targets, weights, cap=0.0):
    """The two sums in float64, token by token."""

    def log_softmax(x, words, cap):
        logits = words.astype(np.float64) @ x.astype(np.float64)
        logits = cap * np.tanh(logits / cap) if cap else logits
        return logits - np.log(np.exp(logits).sum())

    nll = divergence = 0.0
    for b in range(BATCH):
        for t in range(LENGTH):
            log_p = log_softmax(features[b, t], table, cap)
            log_q = log_softmax(teacher_features[b, t], teacher_table, 0.0)
            nll -= weights[b, t] * log_p[targets[b, t]]
            divergence += FACTOR * weights[b, t] * (np.exp(log_q) * (log_q - log_p)).sum()
    return nll + divergence, divergence


@pytest.mark.parametrize(("cap", "few"), [(0.0, False), (2.0, True)])
def test_sums_and_gradients(cap, few):
    """Two slices a sequence; the gradient along a direction in features and table."""
    arrays = draw()
    options = FACTOR, 8, 1, cap, 0.0, few
    loss = lambda features, table: distillation(features, table, *arrays[2:], *options)
    (total, divergence), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arrays[:2])
    np.testing.assert_allclose((total, divergence), reference(*arrays, cap=cap), rtol=1e-5)
    np.testing.assert_allclose(loss(*arrays[:2]), (total, divergence), rtol=1e-6)
    rng = np.random.default_rng(1)
    steps = [rng.normal(size=x.shape) * 1e-5 for x in arrays[:2]]
    moved = [x.astype(np.float64) for x in arrays[:2]]
    ends = [
        reference(*(x + sign * step for x, step in zip(moved, steps, strict=True)), *arrays[2:], cap=cap)[0]
        for sign in (1, -1)
    ]
    expected = (ends[0] - ends[1]) / 2
    actual = sum((np.asarray(g, np.float64) * step).sum() for g, step in zip(gradients, steps, strict=True))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_its_own_teacher_is_cross_entropy():
    """A model that teaches itself has no divergence, and the gradient of the cross entropy."""
    features, table, _, _, targets, weights = draw()
    of_itself = lambda x, words: distillation(x, words, features, table, targets, weights, FACTOR, None)
    (total, divergence), gradients = jax.value_and_grad(of_itself, argnums=(0, 1), has_aux=True)(features, table)
    alone = lambda x, words: cross_entropy(x, words, targets, weights, None)
    (expected, _), expected_gradients = jax.value_and_grad(alone, argnums=(0, 1), has_aux=True)(features, table)
    assert abs(divergence) < 1e-5
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-6)


def test_a_token_without_weight_may_be_nan():
    """Features of padding do not matter, in either model."""
    features, table, teacher_features, teacher_table, targets, weights = draw()
    hole = (weights == 0)[..., None]
    arrays = [jnp.where(hole, jnp.nan, x) for x in (features, teacher_features)]
    loss = lambda x: distillation(x, table, arrays[1], teacher_table, targets, weights, FACTOR, None)
    (total, _), gradient = jax.value_and_grad(loss, has_aux=True)(arrays[0])
    expected, _ = distillation(features, table, teacher_features, teacher_table, targets, weights, FACTOR, None)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert np.isfinite(gradient).all()
