"""Classification head: pooling, logits, loss, and independence of padding and other sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_lm import build_model
from flash_lm.models.classifier import POOLS, ClassHead
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import HeadInputs
from models.cases import assert_close, model_config

CLASSES = 3


def build_classifier(pool="mean", family="transformer_plus_plus", causal=False):
    keys = {"head": "classes", "classes.count": CLASSES, "classes.pool": pool}
    return build_model(model_config(family, causal, **keys), rngs=nnx.Rngs(0))


def test_pools_against_loops():
    draw = np.random.default_rng(0)
    features = draw.normal(size=(3, 5, 4)).astype(np.float32)
    counts = [5, 2, 1]
    real = np.arange(5)[None] < np.array(counts)[:, None]
    for name, expected in {
        "mean": [features[b, :n].astype(np.float64).mean(axis=0) for b, n in enumerate(counts)],
        "first": features[:, 0],
        "last": [features[b, n - 1] for b, n in enumerate(counts)],
    }.items():
        np.testing.assert_allclose(POOLS[name](jnp.array(features), jnp.array(real)), expected, rtol=1e-6)


@pytest.mark.parametrize("pool", POOLS)
def test_one_vector_of_logits_per_sequence_and_padding_is_invisible(pool):
    model, inputs = build_classifier(pool), jnp.int32([[1, 5, 6, 7, 0, 0], [1, 9, 8, 7, 6, 5]])
    segments = jnp.int32([[1, 1, 1, 1, 0, 0], [1] * 6])
    logits = model(inputs, segments)
    assert logits.shape == (2, 1, CLASSES) and logits.dtype == jnp.float32
    other = model(inputs.at[0, 4:].set(11), segments)
    assert_close(other, logits, 1e-6)
    alone = model(inputs[:1, :4])
    assert_close(alone[0], logits[0], 1e-5)
    features = np.asarray(model.pool(model.features(ModelInputs(inputs, segments)), segments), np.float64)
    expected = features @ np.asarray(model.classifier.map.kernel[...], np.float64)
    assert_close(logits, expected + np.asarray(model.classifier.bias[...]), 1e-5)


def test_a_causal_model_sees_the_full_sequence_in_its_last_token():
    """The last token changes the logits with pool=last and mean, but not with first."""
    inputs = jnp.int32([[1, 5, 6, 7]])
    for pool, changes in (("last", True), ("first", False), ("mean", True)):
        model = build_classifier(pool, causal=True)
        difference = np.abs(np.asarray(model(inputs.at[0, 3].set(9)) - model(inputs))).max()
        assert (difference > 1e-6) == changes


def test_loss_and_hits_against_a_loop():
    draw = np.random.default_rng(1)
    kernel, bias = draw.normal(size=(4, CLASSES)), draw.normal(size=CLASSES)
    features, targets, weights = (
        draw.normal(size=(5, 1, 4)),
        np.array([[0], [1], [2], [1], [7]]),
        np.array([1, 1, 1, 1, 0]),
    )
    head = ClassHead(jnp.float32(kernel), jnp.float32(bias))
    inputs = HeadInputs(jnp.float32(features), jnp.int32(targets), jnp.float32(weights[:, None]), 1, 1)
    nll, confusion = 0.0, np.zeros((CLASSES, CLASSES))
    for x, (target,), weight in zip(features[:, 0], targets, weights, strict=True):
        if weight:
            logits = x @ kernel + bias
            nll += np.log(np.exp(logits).sum()) - logits[target]
            confusion[target, logits.argmax()] += 1
    assert float(head.loss(inputs)[0]) == pytest.approx(nll, rel=1e-5)
    scores = {name: x[:4, 0] for name, x in head.scores(inputs).items()}  # the example without weight does not count
    assert float(scores["nll"].sum()) == pytest.approx(nll, rel=1e-5)
    assert float(scores["hits"].sum()) == np.trace(confusion)
    np.testing.assert_array_equal(scores["confusion"].sum(axis=0), confusion)


def test_a_classifier_has_no_output_embedding():
    paths = {
        jax.tree_util.keystr(p)
        for p, _ in jax.tree_util.tree_leaves_with_path(nnx.state(build_classifier(), nnx.Param))
    }
    assert not any("output_embedding" in path for path in paths) and sum("classifier" in path for path in paths) == 2
