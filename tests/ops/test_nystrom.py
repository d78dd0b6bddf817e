"""Landmarks and pseudo-inverses of Nyström attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.nystromformer import inverse, nystrom, segments, softmax

from flash_lm.ops.nystrom import nystrom_attention, pseudo_inverse

B, H, L, K, M = 3, 2, 19, 4, 5


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def inputs() -> list[np.ndarray]:
    return [draw(i, B, H, L, K)[-1] for i in (1, 2, 3)]


def real(lengths) -> np.ndarray:
    return np.arange(L)[None] < np.array(lengths)[:, None]


@jax.jit
def attention(q, k, v, real_BxL):
    return nystrom_attention(q, k, v, real_BxL, landmarks=M, steps=6)


def matrices(*shape: int, peak: float = 0.0) -> np.ndarray:
    """Softmax matrices with peaks on the diagonal."""
    scores = draw(*shape) + peak * np.eye(shape[-1])
    return np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("steps", [1, 6])
def test_the_iterations_are_those_of_the_paper(steps):
    a = matrices(B, H, M, M).astype(np.float32)
    actual = pseudo_inverse(jnp.asarray(a), steps)
    for index in np.ndindex(B, H):
        np.testing.assert_allclose(actual[index], inverse(a[index].astype(float), steps), rtol=1e-4, atol=1e-4)


def test_six_iterations_are_near_the_pseudo_inverse():
    """Six iterations for landmarks that attend mostly to themselves; 20 iterations for any of these matrices."""
    peaked = matrices(B, H, M, M, peak=3.0).astype(np.float32)
    exact = np.linalg.pinv(peaked.astype(float))
    assert np.abs(pseudo_inverse(jnp.asarray(peaked), 6) - exact).max() < 1e-3 * np.abs(exact).max()
    any_ = matrices(H, M, M)
    for a in any_:
        exact = np.linalg.pinv(a)
        assert np.abs(inverse(a, 20) - exact).max() < 1e-6 * np.abs(exact).max()


def test_the_initial_value_depends_on_no_other_sequence_or_head():
    """The authors' code divides by the largest norm of the batch and all heads."""
    a = matrices(B, H, M, M).astype(np.float32)
    together = pseudo_inverse(jnp.asarray(a), 2)
    for b, h in np.ndindex(B, H):
        others = np.random.default_rng(7).normal(size=a.shape).astype(np.float32) * 100
        others[b, h] = a[b, h]
        np.testing.assert_allclose(pseudo_inverse(jnp.asarray(others), 2)[b, h], together[b, h], rtol=1e-6)
    q, k, v = inputs()
    output = np.asarray(attention(q, k, v, real([19, 19, 19])))
    for x in (q, k, v):
        x[1:] *= 30
    np.testing.assert_allclose(attention(q, k, v, real([19, 19, 3]))[0], output[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(19, 12, 6), (5, 4, 1)], ids=str)
def test_landmarks_are_means_of_real_tokens(lengths):
    """Documents of any length, no multiple of the landmarks, in one batch."""
    q, k, v = inputs()
    noise = np.where(real(lengths)[:, None, :, None], 0, 50 * draw(B, H, L, K))
    output = attention(*(x + noise for x in (q, k, v)), real(lengths))
    for b, h in np.ndindex(B, H):
        one = [x[b, h, : lengths[b]].astype(float) for x in (q, k, v)]
        np.testing.assert_allclose(output[b, h, : lengths[b]], nystrom(*one, M, 6), rtol=2e-4, atol=2e-4)


def test_segments_differ_by_one_token_at_most():
    for length in range(M, 40):
        sizes = [len(segment) for segment in segments(length, M)]
        assert sum(sizes) == length and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_gradients_of_short_and_empty_sequences_are_finite_and_exact():
    """The unused iterations must not reach the gradient of a short sequence."""
    q, k, v = inputs()
    lengths = (19, 4, 0)

    def loss(q, k, v, attend):
        return jnp.sum(jnp.where(real(lengths)[:, None, :, None], jnp.square(attend(q, k, v)), 0))

    def exact(q, k, v):
        scores = jnp.einsum("bhtk,bhuk->bhtu", q, k) / K**0.5
        hidden = jnp.where(real(lengths)[:, None, None], scores, -1e30)
        return jnp.einsum("bhtu,bhuk->bhtk", jax.nn.softmax(hidden, axis=-1), v)

    gradients_of = lambda attend: jax.jit(jax.grad(lambda *x: loss(*x, attend), argnums=(0, 1, 2)))(q, k, v)
    actual, expected = gradients_of(lambda *x: attention(*x, real(lengths))), gradients_of(exact)
    for one, other in zip(*jax.tree.map(np.asarray, (actual, expected)), strict=True):
        assert np.isfinite(one).all() and not one[2].any()
        np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-5)


def test_it_estimates_softmax_attention():
    """With nearly as many landmarks as tokens it is close to the exact weights, and weights sum to one."""
    q, k, _ = (x / 2 for x in inputs())
    ones = np.ones((B, H, L, 1), np.float32)
    row_sums = jax.jit(lambda *x: nystrom_attention(*x, real([L] * B), landmarks=18, steps=12))(q, k, ones)
    np.testing.assert_allclose(row_sums, 1, atol=1e-3)
    eye = np.broadcast_to(np.eye(L, dtype=np.float32), (B, H, L, L))
    weights = jax.jit(lambda *x: nystrom_attention(*x, real([L] * B), landmarks=18, steps=12))(q, k, eye)
    expected = np.stack([[softmax(q[b, h] @ k[b, h].T / K**0.5) for h in range(H)] for b in range(B)])
    assert np.abs(weights - expected).mean() < 0.02
