"""FAVOR+ against log-space loops and the softmax attention that it estimates; causality holds to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.performer import favor_logs
from flax import nnx
from models.cases import model_config
from oracles.linear import log_dot
from oracles.segments import visibility

from flash_lm.config.experiment import parse_model
from flash_lm.families.family import complete
from flash_lm.families.performer import FavorCore, FavorOptions
from flash_lm.layers.attention_core import Pair
from flash_lm.layers.context import Context
from flash_lm.layers.linear_core import LinearOptions
from flash_lm.ops.favor import favor, log_features, no_features, orthogonal_frequencies, prefill_favor
from flash_lm.ops.segments import find_segments, whole_row

L, K, E, F, HEADS = 45, 6, 5, 20, 2
IDS = np.array([[1] * 10 + [0] * 3 + [2] * 20 + [1] * 12, [3] * L], np.int32)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


FREQUENCIES = jax.jit(orthogonal_frequencies, static_argnums=(1, 2))(jax.random.key(0), F, K)
V = draw(2, HEADS, L, E)
prefill = jax.jit(prefill_favor, static_argnames="block_size")


def queries_and_keys(scale: float) -> tuple[np.ndarray, np.ndarray]:
    return draw(2, HEADS, L, K) * scale, draw(3, HEADS, L, K)[:2] * scale


@jax.jit
def logs(q, k):
    return log_features(q, FREQUENCIES), log_features(k, FREQUENCIES)


@functools.partial(jax.jit, static_argnames=("block_size", "causal", "packed"))
def run(log_q, log_k, v, ids, **options):
    return favor(log_q, log_k, v, find_segments(ids), **options)


def expected(q, k, v, ids: list[int], causal: bool) -> np.ndarray:
    """Output of one sequence and head, pair by pair."""
    sees, omega = visibility(ids, causal), np.asarray(FREQUENCIES, float)
    log_q, log_k = ([favor_logs(y.astype(float), omega) for y in x] for x in (q, k))
    out = np.zeros((L, E))
    for t in range(L):
        visible = [u for u in range(L) if sees(t, u)]
        if visible:
            pair = np.array([log_dot(log_q[t], log_k[u]) for u in visible])
            weights = np.exp(pair - pair.max())
            out[t] = weights @ v[visible].astype(float) / weights.sum()
    return out


# At thirty times the size the exponents are some thousand, and float32 has them to 1e-4.
@pytest.mark.parametrize(("scale", "atol"), [(1.0, 1e-5), (30.0, 1e-3)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    "block_size", [pytest.param(1, marks=pytest.mark.slow("another size of the blocks: the same code")), 8, 64]
)
def test_values(block_size, causal, scale, atol):
    q, k = queries_and_keys(scale)
    out = np.asarray(run(*logs(q, k), V, IDS, block_size=block_size, causal=causal, packed=True))
    for b, ids in enumerate(IDS.tolist()):
        for h in range(HEADS):
            expected_head = expected(q[b, h], k[b, h], V[b, h], ids, causal)
            np.testing.assert_allclose(out[b, h], expected_head, rtol=0, atol=atol)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_one_document_per_sequence_equals_packing(scale):
    q, k = queries_and_keys(scale)
    ids = np.array([[1] * (L - 7) + [0] * 7, [1] * L], np.int32)
    both = [run(*logs(q, k), V, ids, block_size=8, causal=False, packed=packed) for packed in (False, True)]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_prefill_in_parts_is_the_parallel_form(scale):
    """Sequences at different positions, parts of any length, also empty."""
    log_q, log_k = logs(*queries_and_keys(scale))
    full = np.asarray(run(log_q, log_k, V, np.ones((1, L), np.int32), block_size=8, causal=True, packed=False))
    state, start = no_features(2, HEADS, F, E), np.zeros(2, np.int32)
    for parts in ((13, 2), (0, 7), (1, 1), (17, 20), (1, 0), (12, 14), (1, 1)):
        size = 20 if max(parts) > 1 else 1  # two compiled shapes
        index = (start[:, None] + np.arange(size)).clip(0, L - 1)
        take = lambda x, index=index: np.take_along_axis(np.asarray(x), index[:, None, :, None], axis=2)
        real = np.arange(size)[None] < np.array(parts)[:, None]
        garbage = [np.where(real[:, None, :, None], take(x), np.nan) for x in (log_q, log_k, V)]
        out, state = prefill(*garbage, state, real, block_size=8)
        for b, n in enumerate(parts):
            expected_part = full[b, :, start[b] : start[b] + n]
            np.testing.assert_allclose(np.asarray(out)[b, :, :n], expected_part, rtol=0, atol=1e-5)
        start += np.array(parts, np.int32)
    assert start.tolist() == [L, L]


@pytest.mark.parametrize("block_size", [8, 64])
def test_later_keys_have_no_effect(block_size):
    """Not even through a maximum: with other later keys an output keeps all its bits.

    Slightly larger keys use the same form as before. Keys a thousand times as large (two kinds) select the other form,
    whose outputs are equal up to rounding.
    """
    q, k = queries_and_keys(1.0)
    attend = functools.partial(run, ids=np.ones((1, L), np.int32), block_size=block_size, causal=True, packed=False)
    log_q, log_k = (np.asarray(x) for x in logs(q, k))
    before = np.asarray(attend(log_q, log_k, V))
    for t in (0, 7, 8, 30):
        later = np.arange(L) > t
        values = np.where(later[:, None], 1e6, V).astype(np.float32)
        after = [
            np.asarray(attend(log_q, np.where(later[:, None], size * np.abs(log_k) + size, log_k), values))
            for size in np.float32([1.2, 1000, 2000])
        ]
        np.testing.assert_array_equal(after[0][:, :, : t + 1], before[:, :, : t + 1])
        np.testing.assert_array_equal(after[1][:, :, : t + 1], after[2][:, :, : t + 1])
        np.testing.assert_allclose(after[1][:, :, : t + 1], before[:, :, : t + 1], rtol=0, atol=1e-6)
        assert not any(np.array_equal(x[:, :, t + 1], before[:, :, t + 1]) for x in after)


def test_frequencies_are_orthogonal_and_as_long_as_gaussian_vectors():
    keys = jax.random.split(jax.random.key(1), 400)
    many = np.asarray(jax.jit(jax.vmap(lambda key: orthogonal_frequencies(key, 20, 8)))(keys), np.float64)
    for start in (0, 8, 16):
        block = many[:, start : start + 8]
        gram = block @ block.swapaxes(1, 2)
        off = gram * (1 - np.eye(block.shape[1]))
        assert np.abs(off).max() < 1e-4
    squares = (many**2).sum(axis=-1)
    assert squares.mean() == pytest.approx(8, rel=0.02)  # chi-squared with 8 degrees of freedom has mean 8, variance 16
    assert squares.var() == pytest.approx(16, rel=0.1)
    assert np.abs(many.mean(axis=0)).max() < 5 / np.sqrt(400)  # no direction is preferred
    assert np.abs((many**2).mean(axis=0) - 1).max() < 5 * np.sqrt(2 / 400)


def softmax_attention(q, k, v) -> np.ndarray:
    scores = np.tril(np.exp(q.astype(float) @ k.astype(float).swapaxes(-1, -2) / np.sqrt(K)))
    return scores @ v / scores.sum(axis=-1, keepdims=True)


@pytest.mark.slow("draws 30 sets of up to 1024 features")
def test_the_error_falls_with_the_root_of_the_number_of_features():
    """Root mean square error over draws against exact softmax attention: 16 times the features, a fourth of the error.

    The estimate's variance grows as exp ‖q + k‖², so large queries and keys would need far more features to show it.
    """
    q, k = queries_and_keys(0.3)
    exact = softmax_attention(q, k, V)

    def error(count: int) -> float:
        @jax.jit
        def once(key):
            omega = orthogonal_frequencies(key, count, K)
            features = log_features(q, omega), log_features(k, omega)
            return favor(*features, jnp.asarray(V), whole_row(L), block_size=16, causal=True, packed=False)

        draws = [np.asarray(once(key)) - exact for key in jax.random.split(jax.random.key(count), 30)]
        return float(np.sqrt(np.mean(np.square(draws))))

    errors = {count: error(count) for count in (16, 64, 256, 1024)}
    assert errors[1024] < 0.05 * np.std(exact)
    slope = np.polyfit(np.log(list(errors)), np.log(list(errors.values())), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.05), errors


@pytest.mark.parametrize("redraw", [True, False])
def test_features_are_redrawn_only_in_training(redraw):
    config = complete(parse_model(model_config("performer", True, **{"favor.redraw": redraw})))
    core = nnx.jit(lambda: FavorCore(config, config[FavorOptions], config[LinearOptions], rngs=nnx.Rngs(0)))()
    q, k, v = (jnp.asarray(draw(i, 2, 29, 16)[:1]) for i in (4, 5, 6))

    @jax.jit
    def mix(key):
        segments = whole_row(29)
        context = Context(positions_BxL=segments.offsets_BxL, segments=segments, dropout_key=key)
        return core({"attention": Pair(q, k)}, v, context)

    def run(seed: int | None) -> np.ndarray:
        return np.asarray(mix(None if seed is None else jax.random.key(seed)))

    np.testing.assert_array_equal(run(None), run(None))
    np.testing.assert_array_equal(run(1), run(1))
    assert np.array_equal(run(1), run(None)) == (not redraw)
    assert np.array_equal(run(1), run(2)) == (not redraw)
