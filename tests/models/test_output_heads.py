"""Output head for images: logits, loss and decoding agree, and training raises the likelihood."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_lm import build_model
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.models.output_heads import HeadInputs, LogisticsHead
from models.cases import assert_close, model_config

VOCAB = 260
compute_logits = nnx.jit(lambda model, inputs: model(inputs))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request):
    keys = {"head": "logistics", "logistics.mixtures": 3, "vocab_size": VOCAB, "tie_embeddings": request.param}
    return build_model(model_config("linear_transformer", True, **keys), rngs=nnx.Rngs(0))


def test_logits_are_log_probabilities_of_values_only(model):
    logits = np.asarray(compute_logits(model, np.int32([[1, 4, 259, 100]])))
    assert logits.shape == (1, 4, VOCAB) and np.isneginf(logits[..., :4]).all()
    np.testing.assert_allclose(np.exp(logits).sum(axis=-1), 1, rtol=1e-5)


def test_components_start_spread_over_the_values(model):
    """With zero features: equal logistics of scale 1/e³ with means from −1 to 1."""
    logits = nnx.jit(lambda model: model.head().logits(jnp.zeros((1, 32))))(model)
    probabilities = np.exp(np.asarray(logits))[0, -256:]
    edges = (np.arange(257) - 0.5) / 127.5 - 1
    edges[0], edges[-1] = -np.inf, np.inf
    below = 1 / (1 + np.exp(-(edges - np.array([[-1.0], [0.0], [1.0]])) * np.exp(3)))
    np.testing.assert_allclose(probabilities, np.diff(below, axis=1).mean(axis=0), rtol=1e-4)


def test_it_learns_a_value_between(model):
    """Not the first or last value, whose mass is that of a tail; features are constant."""
    head, features = model.head(), jnp.ones((1, 4, 32))
    targets, weights = jnp.full((1, 4), 4 + 90), jnp.full((1, 4), 0.25)
    loss = jax.jit(
        jax.value_and_grad(
            lambda kernel: head._replace(kernel_Dx3P=kernel).loss(HeadInputs(features, targets, weights, 1, 1))[0]
        )
    )
    kernel = head.kernel_Dx3P
    before = float(loss(kernel)[0])
    for _ in range(500):
        kernel -= 0.002 * jnp.sign(loss(kernel)[1])
    assert float(loss(kernel)[0]) < 1 < before


def test_weights_move_ten_times_as_far_as_means_and_scales(model):
    head, features = model.head(), jnp.ones((1, 32)) / 32
    before, moved = (
        np.asarray(x._parameters(features))[0] for x in (head, head._replace(kernel_Dx3P=head.kernel_Dx3P + 1))
    )
    np.testing.assert_allclose(moved - before, [1, 1, 1] + [0.1] * 6, rtol=1e-4)


def test_the_loss_is_that_of_the_logits(model):
    inputs, targets = np.int32([[1, 4, 259, 100]]), np.int32([[4, 259, 100, 0]])
    weights = np.float32([[1, 2, 1, 0]])  # the last target is not a value and has no weight
    logits = np.asarray(compute_logits(model, inputs))[0]
    expected = -(logits[np.arange(3), targets[0, :3]] * weights[0, :3]).sum()

    @nnx.jit
    def loss_and_scores(model, inputs, targets, weights):
        rows = HeadInputs(model.features(ModelInputs(inputs)), targets, weights, 1024, 1)
        return model.head().loss(rows)[0], model.head().scores(rows)

    loss, scores = loss_and_scores(model, inputs, targets, weights)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert scores.keys() == {"nll"}


def test_steps_give_the_logits_of_the_full_sequence(model):
    inputs = np.int32([[1, 4, 259, 100]])
    expected, state = np.asarray(compute_logits(model, inputs)), model.init_state(1)
    step = nnx.jit(lambda model, tokens, state: model.step(tokens, state))
    for t in range(4):
        logits, state = step(model, inputs[:, t], state)
        assert_close(np.asarray(logits)[:, 4:], expected[:, t, 4:], 1e-5)


def test_it_has_no_output_embedding(model):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))]
    assert any("mixture" in path for path in paths) and not any("output_embedding" in path for path in paths)
    assert isinstance(model.head(), LogisticsHead)
    assert model.head().kernel_Dx3P.shape == (32, 9)
