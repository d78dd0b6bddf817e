"""Dropout: rate, position in the model, and random keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.cases import assert_close, case, draw_parameters, model_config, tokens

from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete
from flash_lm.layers.context import Context
from flash_lm.models.block import Block
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.ops.dropout import drop
from flash_lm.ops.segments import whole_row

RATE = 0.3
KEY = jax.random.key(3)


def assert_rate(dropped: np.ndarray) -> None:
    """Checks that a share RATE is dropped, within five standard deviations."""
    assert dropped.mean() == pytest.approx(RATE, abs=5 * np.sqrt(RATE * (1 - RATE) / dropped.size))


def test_drop():
    kept = np.asarray(jax.jit(drop, static_argnums=1)(np.ones((20, 30, 40), np.float32), RATE, KEY))
    assert_rate(kept == 0)
    np.testing.assert_allclose(kept[kept != 0], 1 / (1 - RATE), rtol=1e-6)
    # Entries are dropped independently, not as complete tokens or channels.
    for axis in range(3):
        assert (kept == 0).mean(axis=axis).std() > 0
        assert (kept == 0).all(axis=axis).sum() < 5


def test_no_drop_without_key_or_rate():
    x = jnp.arange(6.0).reshape(1, 2, 3)
    assert drop(x, RATE, None) is x
    assert drop(x, 0.0, KEY) is x
    assert drop(x.astype(jnp.bfloat16), RATE, KEY).dtype == jnp.bfloat16


@pytest.mark.parametrize("family", ["transformer", "flash"])
def test_keys(family):
    """The same key gives the same logits, another key gives others, and no key those of the model without dropout."""
    model, plain = case(family, True, dropout=RATE), case(family, True)
    run = lambda key: np.asarray(model.logits(model.params, tokens(), None, None, key))
    np.testing.assert_array_equal(run(KEY), run(KEY))
    assert np.abs(run(KEY) - run(jax.random.key(4))).max() > 0.1
    assert_close(model.logits(model.params, tokens()), plain.logits(plain.params, tokens()), 1e-6)


def test_the_embedding_is_dropped():
    """With layers that output zeros only the embedding is left, and an RMS norm keeps its zeros."""
    model = case("transformer_plus", True, dropout=RATE, norm="rms")
    params = jax.tree.map(np.copy, model.params)
    for name in ("sublayer_0", "sublayer_1"):
        params["layers"][name]["output" if name == "sublayer_0" else "down"]["kernel"][:] = 0
    features = jax.jit(lambda params: model.model(params).features(ModelInputs(tokens()), KEY))(params)
    assert_rate(np.asarray(features) == 0)


@pytest.mark.parametrize("family", ["transformer", "flash"])
def test_each_sublayers_output_is_dropped(family):
    """With the other sublayer zeroed the residual changes by one output; the two sublayers have different masks."""
    config = complete(parse_model(model_config(family, True, dropout=RATE, model_dim=64, rotary=False)))
    graph, state = nnx.split(nnx.eval_shape(lambda: Block([config], rngs=nnx.Rngs(0))))
    values = draw_parameters(nnx.to_pure_dict(state))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 29, 64)), jnp.float32)
    segments = whole_row(29)
    context = Context(positions_BxL=segments.offsets_BxL, segments=segments, dropout_key=KEY)

    @jax.jit
    def change(params):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(x, context, lambda x: ())[0] == x

    masks = []
    for silent in ("sublayer_1", "sublayer_0"):
        silenced = jax.tree.map(np.copy, values)
        silenced[silent]["output" if "output" in silenced[silent] else "down"]["kernel"][:] = 0
        dropped = np.asarray(change(silenced))
        assert_rate(dropped)
        masks.append(dropped)
    assert (masks[0] != masks[1]).mean() == pytest.approx(2 * RATE * (1 - RATE), abs=0.05)


@pytest.mark.slow("runs a unit eagerly, operation by operation")
def test_mega_drops_its_candidate():
    """x (1 − σ(u)) + σ(u) drop(h): the residual stream is not dropped, although the unit owns its residual."""
    config = complete(parse_model(model_config("mega", True, dropout=RATE, model_dim=64)))
    unit = FAMILIES["mega"].sublayers[0](config, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 29, 64)), jnp.float32)
    segments = whole_row(29)
    context = Context(positions_BxL=segments.offsets_BxL, segments=segments)
    rest = x * (1 - jax.nn.sigmoid(unit.project(x, context).gate.update))
    undropped, dropped = unit(x, context) - rest, unit(x, dataclasses.replace(context, dropout_key=KEY)) - rest
    zeros = np.abs(np.asarray(dropped)) < 1e-6
    assert_rate(zeros)
    np.testing.assert_allclose(dropped[~zeros], undropped[~zeros] / (1 - RATE), rtol=1e-3, atol=1e-5)


def test_a_closing_half_step_drops_its_output():
    """norm(x + drop(h)) with the norm removed: the residual stream is not dropped."""
    config = complete(parse_model(model_config("conformer", True, dropout=RATE, model_dim=64)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 29, 64)), jnp.float32)

    @jax.jit
    def change(key):
        unit = FAMILIES["conformer"].sublayers[-1](config, rngs=nnx.Rngs(0))
        unit.closing_norm = lambda x: x
        segments = whole_row(29)
        return unit(x, Context(positions_BxL=segments.offsets_BxL, segments=segments, dropout_key=key)) - x

    undropped, dropped = np.asarray(change(None)), np.asarray(change(KEY))
    zeros = np.abs(dropped) < 1e-6
    assert_rate(zeros)
    np.testing.assert_allclose(dropped[~zeros], undropped[~zeros] / (1 - RATE), rtol=1e-3, atol=1e-5)


def test_layers_have_different_masks():
    """Two layers with the same parameters draw different masks."""
    model = case("transformer_plus", True, dropout=RATE, num_layers=2)
    original = jax.random.bernoulli

    @jax.jit
    def drawn(params):
        calls = []

        def spy(key, p, shape):
            calls.append(original(key, p, shape))
            return calls[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.random, "bernoulli", spy)
            patch.setattr(jax.lax, "scan", scan_unrolled)
            model.model(params).features(ModelInputs(tokens()), KEY)
        return calls

    masks = [np.asarray(mask) for mask in drawn(model.params)]
    assert len(masks) == 1 + 2 * 2
    for i, mask in enumerate(masks):
        assert_rate(~mask)
        for other in masks[:i]:
            assert (mask != other).mean() > RATE * (1 - RATE)


def scan_unrolled(body, carry, xs, unroll=1):
    """lax.scan as a Python loop, so that the masks in the body are values outside of it, too."""
    outputs = []
    for n in range(jax.tree.leaves(xs)[0].shape[0]):
        carry, output = body(carry, jax.tree.map(lambda x, n=n: x[n], xs))
        outputs.append(output)
    return carry, None if outputs[0] is None else jax.tree.map(lambda *y: jnp.stack(y), *outputs)
