"""The chunked cross entropy against a float64 loop, for any chunk size."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flash_lm.ops.cross_entropy import cross_entropy, token_scores
from flash_lm.ops.on_mesh import gather_table
from flash_lm.ops.token_slices import slice_tokens

B, L, D, V = 2, 7, 5, 11
weighted_sum = jax.jit(cross_entropy, static_argnums=range(4, 10))
scores = jax.jit(token_scores, static_argnums=range(4, 8))


def inputs():
    draw = np.random.default_rng(0)
    features, table = draw.normal(size=(B, L, D)), 3 * draw.normal(size=(V, D))
    targets = draw.integers(V, size=(B, L))
    weights = np.array([[1, 1, 0, 1, 2, 1, 0], [0, 1, 1, 1, 1, 0.5, 1]])
    return features, table, targets, weights


def oracle(features, table, targets, weights):
    """Computes the sum and its gradients token by token."""
    total, d_features, d_table = 0.0, np.zeros_like(features), np.zeros_like(table)
    for b in range(B):
        for t in range(L):
            logits = table @ features[b, t]
            p = np.exp(logits - logits.max())
            p /= p.sum()
            total -= weights[b, t] * np.log(p[targets[b, t]])
            p[targets[b, t]] -= 1
            d_features[b, t] = weights[b, t] * (table.T @ p)
            d_table += weights[b, t] * np.outer(p, features[b, t])
    return total, d_features, d_table


@pytest.mark.parametrize(("parts", "few"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("chunk", [1, 4, 6, 100])
def test_value_and_gradients_equal_the_loop(chunk, parts, few):
    features, table, targets, weights = inputs()
    expected, *gradients = oracle(features, table, targets, weights)
    arguments = (jnp.float32(features), jnp.float32(table), jnp.int32(targets), jnp.float32(weights))
    assert np.allclose(weighted_sum(*arguments, chunk, parts, 0.0, 0.0, 0.0, few)[0], expected, rtol=1e-6)

    def scaled_loss(features, table):
        return 3 * cross_entropy(features, table, *arguments[2:], chunk, parts, few_targets=few)[0]

    value, actual = jax.jit(jax.value_and_grad(scaled_loss, argnums=(0, 1)))(*arguments[:2])
    assert np.allclose(value, 3 * expected, rtol=1e-6)
    for a, b in zip(actual, gradients, strict=True):
        assert np.allclose(a, 3 * b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("parts", "platform"), [(1, "cpu"), (2, "cpu"), (2, "tpu")])
def test_z_loss_equals_the_loop(parts, platform, monkeypatch):
    """z · log² Z; its gradient by the logits is 2 z log Z · softmax, as each platform computes it."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    features, table, targets, weights = inputs()
    z, (plain, d_features, d_table), extra = 0.3, oracle(features, table, targets, weights), 0.0
    for b, t in np.ndindex(weights.shape):
        logits = table @ features[b, t]
        log_z = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        extra += weights[b, t] * z * log_z**2
        d_logits = weights[b, t] * 2 * z * log_z * np.exp(logits - log_z)
        d_features[b, t] += table.T @ d_logits
        d_table += np.outer(d_logits, features[b, t])
    arguments = (jnp.float32(features), jnp.float32(table), jnp.int32(targets), jnp.float32(weights))
    loss = lambda f, t: cross_entropy(f, t, *arguments[2:], 4, parts, z)
    value_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (total, (apart, other)), gradients = value_and_gradients(*arguments[:2])
    assert np.allclose((total, apart), (plain + extra, extra), rtol=1e-5) and other == 0
    for a, b in zip(gradients, (d_features, d_table), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.1)])
def test_capped_logits_and_penalties_equal_the_formula(z_loss, smoothing):
    """Value and gradients in float64 for cap · tanh(logits / cap); targets have 1 − ε, and each word ε / V."""
    features, table, targets, weights = inputs()
    cap, h = 2.5, 1e-6

    def expected(features, table):
        logits = cap * np.tanh(features @ table.T / cap)
        log_z = np.log(np.exp(logits).sum(axis=-1))
        target_probs = (1 - smoothing) * np.eye(len(table))[targets] + smoothing / len(table)
        nll = log_z - (target_probs * logits).sum(axis=-1)
        return (weights * (nll + z_loss * log_z**2)).sum()

    arguments = (jnp.float32(features), jnp.float32(table), jnp.int32(targets), jnp.float32(weights))
    loss = lambda f, t: cross_entropy(f, t, *arguments[2:], 4, 2, z_loss, cap, smoothing)[0]
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arguments[:2])
    assert np.isclose(value, expected(features, table), rtol=1e-5)
    for which, gradient in enumerate(map(np.asarray, gradients)):
        for index in np.ndindex(gradient.shape):
            shifted = [[features, table], [features, table]]
            for sign, pair in zip((h, -h), shifted, strict=True):
                pair[which] = pair[which].copy()
                pair[which][index] += sign
            slope = (expected(*shifted[0]) - expected(*shifted[1])) / (2 * h)
            assert np.isclose(gradient[index], slope, rtol=1e-3, atol=1e-4)
    nll, hits = (np.asarray(x) for x in scores(*arguments, 4, 2, cap))
    penalties = weighted_sum(*arguments, 4, 2, z_loss, cap, smoothing)[1]
    assert np.isclose((nll * weights).sum(), value - sum(penalties), rtol=1e-5)
    assert [float(x) != 0 for x in penalties] == [z_loss > 0, smoothing > 0]
    assert (hits == scores(*arguments, 4, 2)[1]).all()


@pytest.mark.parametrize(("parts", "few"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("chunk", [1, 4, 6, 100])
def test_scores_of_tokens_equal_the_formula(chunk, parts, few):
    """Each token with a weight gets its score, wherever it is; the others get zeros."""
    features, table, targets, weights = inputs()
    logits, counts = features @ table.T, weights > 0
    best = logits.argmax(axis=-1)
    targets = np.where(np.arange(L) % 2, best, targets)
    dirty = np.where(counts[..., None], features, 1e18)
    arguments = (jnp.float32(dirty), jnp.float32(table), jnp.int32(targets), jnp.float32(weights))
    nll, hits = (np.asarray(x) for x in scores(*arguments, chunk, parts, 0.0, few))
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(nll, np.where(counts, expected, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(hits, (best == targets) & counts)
    assert 0 < hits.sum() < counts.sum()


@pytest.mark.parametrize("few", [False, True])
def test_a_token_without_weight_has_no_effect(few):
    features, table, targets, weights = (np.float32(x) for x in inputs())
    dirty = np.where(weights[..., None] > 0, features, np.float32(1e18))
    clean, soiled = (
        weighted_sum(x, table, targets.astype(np.int32), weights, 4, 1, 0.0, 0.0, 0.0, few) for x in (features, dirty)
    )
    assert clean == soiled


def test_no_array_of_all_logits_exists():
    shapes = (jax.ShapeDtypeStruct(s, d) for s, d in [((4, 64, 8), jnp.float32), ((512, 8), jnp.float32)])
    tokens = [jax.ShapeDtypeStruct((4, 64), d) for d in (jnp.int32, jnp.float32)]
    step = jax.jit(jax.value_and_grad(lambda *x: cross_entropy(*x, 16)[0], argnums=(0, 1)))
    memory = step.lower(*shapes, *tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 64 * 512 * 4 / 2


ON_ACCELERATORS = (32768, 8192, 1024)


@pytest.mark.parametrize(
    ("platform", "sizes"), [("cpu", (1024,) * 3), ("gpu", ON_ACCELERATORS), ("tpu", ON_ACCELERATORS)]
)
def test_slices_suit_the_device(platform, sizes, monkeypatch):
    """On a GPU or TPU the largest power of two within 2^30 bytes of float32 logits; never fewer than 1024 tokens."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert tuple(slice_tokens(words) for words in (8192, 32000, 300_000)) == sizes
    assert slice_tokens(8192, few_targets=True) == 1024


@pytest.mark.parametrize(
    ("platform", "few", "loops"), [("cpu", False, ["length=2"]), ("gpu", False, ["length=1"]), ("gpu", True, ["while"])]
)
def test_the_number_of_slices_is_known_unless_few_tokens_count(platform, few, loops, monkeypatch):
    """The loops of the traced program, for 2048 tokens and an open size of slices."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    shapes = [((2, 1024, 4), jnp.float32), ((8, 4), jnp.float32), ((2, 1024), jnp.int32), ((2, 1024), jnp.float32)]
    loss = lambda *x: cross_entropy(*x, None, few_targets=few)[0]
    program = str(jax.make_jaxpr(loss)(*(jax.ShapeDtypeStruct(*x) for x in shapes)))
    assert re.findall(r"length=\d+|\bwhile\b", program) == loops


@pytest.mark.parametrize(("words", "spec"), [(8, PartitionSpec("tensor", None)), (7, PartitionSpec(None, None))])
def test_devices_gather_the_table_but_for_words_over_tensor(words, spec):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    sharded = NamedSharding(mesh, PartitionSpec("tensor" if words % 2 == 0 else None, "fsdp"))
    table = jax.device_put(np.arange(4.0 * words).reshape(words, 4), sharded)
    with jax.set_mesh(mesh):
        gathered = jax.jit(lambda x: gather_table(x, "float32"))(table)
    assert gathered.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    np.testing.assert_array_equal(gathered, table)
