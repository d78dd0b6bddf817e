"""Classification head: pooling, logits, loss, and independence of padding and other sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.models.classifier import POOLS, ClassHead
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import HeadInputs
from models.cases import assert_close, case

CLASSES = 3


def classifier(pool="mean", family="transformer_plus_plus", causal=False):
    return case(family, causal, **{"head": "classes", "classes.count": CLASSES, "classes.pool": pool})


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
    model, inputs = classifier(pool), np.int32([[1, 5, 6, 7, 0, 0], [1, 9, 8, 7, 6, 5]])
    segments = np.int32([[1, 1, 1, 1, 0, 0], [1] * 6])
    logits = np.asarray(model.logits(model.params, inputs, segments))
    assert logits.shape == (2, 1, CLASSES) and logits.dtype == np.float32
    other = np.where(segments > 0, inputs, 11).astype(np.int32)
    assert_close(model.logits(model.params, other, segments), logits, 1e-6)
    alone = np.asarray(model.logits(model.params, inputs[:1, :4]))
    assert_close(alone[0], logits[0], 1e-5)

    @jax.jit
    def pooled(params):
        bound = model.model(params)
        return bound.pool(bound.features(ModelInputs(inputs, segments)), segments)

    features, parameters = np.asarray(pooled(model.params), np.float64), model.params["classifier"]
    assert_close(logits, features @ parameters["map"]["kernel"].astype(np.float64) + parameters["bias"], 1e-5)


def test_a_causal_model_sees_the_full_sequence_in_its_last_token():
    """The last token changes the logits with pool=last and mean, but not with first."""
    inputs = np.int32([[1, 5, 6, 7]])
    for pool, changes in (("last", True), ("first", False), ("mean", True)):
        model = classifier(pool, causal=True)
        before, after = (np.asarray(model.logits(model.params, x)) for x in (inputs, np.int32([[1, 5, 6, 9]])))
        difference = np.abs(after - before).max()
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
    loss, scores = jax.jit(lambda inputs: (head.loss(inputs)[0], head.scores(inputs)))(inputs)
    assert float(loss) == pytest.approx(nll, rel=1e-5)
    scores = {name: np.asarray(x)[:4, 0] for name, x in scores.items()}  # the example without weight does not count
    assert float(scores["nll"].sum()) == pytest.approx(nll, rel=1e-5)
    assert float(scores["hits"].sum()) == np.trace(confusion)
    np.testing.assert_array_equal(scores["confusion"].sum(axis=0), confusion)


def test_a_classifier_has_no_output_embedding():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(classifier().params)]
    assert not any("output_embedding" in path for path in paths) and sum("classifier" in path for path in paths) == 2
