"""Sublayers with special features: a custom residual, a penalty in the loss, a constrained parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, Family, complete, register_family
from flash_lm.families.sublayer_spec import SublayerSpec
from flash_lm.layers.parameter import VECTORS
from flash_lm.layers.sublayer import Sublayer
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.train_state import ModelFunction, init_state
from flash_lm.training.train_step import make_gradients, make_scheduled_step

pytestmark = pytest.mark.usefixtures("usual_promotion")
VOCAB, B, L, LAYERS, PULL = 16, 4, 8, 3, 0.25


class Gain(Sublayer):
    """x · gain without residual and norm; a penalty pulls gains to zero, and they are at most 1."""

    owns_residual = True

    def __init__(self, config, *, rngs):
        gain = 0.9 + 0.1 * jax.random.uniform(rngs.params(), (config.model_dim,))
        self.gain = nnx.Param(gain, project=lambda gain: jnp.minimum(gain, 1.0), **VECTORS)

    def __call__(self, x_BxLxD, context):
        return x_BxLxD * self.gain[...]

    def penalty(self):
        return PULL * jnp.square(self.gain[...]).sum()

    def flops_per_token(self, length, causal):
        return 0.0


class Free(Gain):
    """Gain without a penalty."""

    penalty = Sublayer.penalty


class Fading(Free):
    """Each layer has a smaller constant factor."""

    def layer_arrays(self, numbers_N):
        return {"share": 1 / (1.0 + numbers_N)}

    def __call__(self, x_BxLxD, context):
        return x_BxLxD * self.gain[...] * self.share[...]


@pytest.fixture(scope="module", autouse=True)
def families():
    register_family("gain", Family((SublayerSpec(Gain),)))
    register_family("free", Family((SublayerSpec(Free),)))
    register_family("fading", Family((SublayerSpec(Fading), SublayerSpec(Free))))
    register_family("one_way", Family((SublayerSpec(Free, serves=frozenset({"causal"})),)))
    register_family("both_ways", Family((SublayerSpec(Free, serves=frozenset({"bidirectional", "packed"})),)))
    yield
    for name in ("gain", "free", "fading", "one_way", "both_ways"):
        del FAMILIES[name]


def function(family: str, model=None, **keys):
    config = get_config()
    config.model.update(family=family, num_layers=LAYERS, model_dim=8, max_length=L, vocab_size=VOCAB, init="lecun")
    config.model.update(model or {})
    config.data.tokens_per_batch = B * L
    config.train.update(warmup_steps=0, clip=0.0, weight_decay=0.0, **keys)
    parsed = parse(config)
    return ModelFunction(complete(parsed.model), seed=0), parsed.train


def batch():
    draw = np.random.default_rng(0)
    return {
        "inputs_BxL": draw.integers(VOCAB, size=(B, L), dtype=np.int32),
        "targets_BxL": draw.integers(VOCAB, size=(B, L), dtype=np.int32),
        "loss_mask_BxL": (draw.random((B, L)) < 0.8).astype(np.float32),
        "segment_ids_BxL": np.ones((B, L), np.int32),
        "positions_BxL": np.tile(np.arange(L, dtype=np.int32), (B, 1)),
    }


def gains(params) -> np.ndarray:
    return np.asarray(params["layers"]["sublayer_0"]["gain"])


def test_a_sublayer_that_owns_the_residual_gets_it_raw():
    """In training and decoding each layer multiplies its input by the gain, with no norm and no residual added."""
    model, _ = function("free")
    params, inputs = model.init(), batch()["inputs_BxL"]
    assert not any("norm" in name for name in params["layers"]) and gains(params).shape == (LAYERS, 8)

    @jax.jit
    def full(params):
        bound = model.bind(params)
        return bound.activations(lambda x: x, ModelInputs(inputs)), bound(inputs), bound.init_state(B)

    activations, expected, state = full(params)
    x = np.asarray(activations["embedding"])
    for n in range(LAYERS):
        x = x * gains(params)[n]
        np.testing.assert_allclose(activations["layers"][n], x, rtol=1e-6)
    expected = np.asarray(expected)
    prefill = jax.jit(lambda params, *arguments: model.bind(params).prefill(*arguments))
    step = jax.jit(lambda params, *arguments: model.bind(params).step(*arguments))
    logits, state = prefill(params, inputs[:, :5], state)
    np.testing.assert_allclose(logits, expected[:, :5], rtol=1e-5, atol=1e-6)
    for t in range(5, L):
        logits, state = step(params, inputs[:, t], state)
        np.testing.assert_allclose(logits, expected[:, t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "accumulate", [pytest.param(1, marks=pytest.mark.slow("without microbatches, which the quick case has")), 2]
)
def test_a_penalty_is_in_the_gradient_but_not_in_the_reported_loss(accumulate):
    model, config = function("gain", accumulate=accumulate)
    plain, _ = function("free")
    params, data = model.init(), batch()
    tokens = data["loss_mask_BxL"].sum()
    (total, penalties), actual, _ = jax.jit(make_gradients(model, config, seed=0))(params, jnp.int32(0), data)
    (alone, none), expected, _ = jax.jit(make_gradients(plain, config, seed=0))(params, jnp.int32(0), data)
    expected_penalty = PULL * np.square(gains(params)).sum()
    assert not none and penalties.keys() == {"penalty"}
    np.testing.assert_allclose(total - alone, tokens * expected_penalty, rtol=1e-5)
    np.testing.assert_allclose(gains(actual) - gains(expected), 2 * PULL * tokens * gains(params), rtol=1e-4)
    optimizer = make_optimizer(config, model.traits())
    state = jax.jit(lambda: init_state(model, optimizer))()
    _, metrics = jax.jit(make_scheduled_step(model, optimizer, config, seed=0))(state, data)
    np.testing.assert_allclose(metrics["penalty"], expected_penalty, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], alone / tokens, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_step_projects_the_parameter_to_its_constraint(optimizer):
    """Each layer is projected separately; parameters inside the constraint are not changed."""
    model, config = function("free", learning_rate=0.2, optimizer=optimizer)
    chain = make_optimizer(config, model.traits())
    state = jax.jit(lambda: init_state(model, chain))()
    after, _ = jax.jit(make_scheduled_step(model, chain, config, seed=0))(state, batch())
    _, gradients, _ = jax.jit(make_gradients(model, config, seed=0))(state.params, jnp.int32(0), batch())
    upwards = gains(gradients) < 0
    assert upwards.any() and not upwards.all()
    np.testing.assert_allclose(gains(after.params)[upwards], 1.0, rtol=1e-6)
    assert (gains(after.params)[~upwards] < gains(state.params)[~upwards]).all()
    assert gains(after.params).max() <= 1


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("pattern", [(), ("fading", "free", "fading")], ids=str)
def test_arrays_scan_with_the_layers(scanned, pattern):
    """Layers are numbered through the model; the arrays are not trained."""
    model, _ = function("fading", model={"pattern": pattern, "num_layers": 6, "scan_layers": scanned})
    params, inputs = model.init(), batch()["inputs_BxL"]
    assert "share" not in str(jax.tree_util.tree_structure(params)) and "share" in str(model.constants)
    activations = jax.jit(lambda params: model.bind(params).activations(lambda x: x, ModelInputs(inputs)))(params)
    activations, layers = jax.device_get((activations, params["layers"]))
    x = activations["embedding"]
    is_fading = [True] if not pattern else [True, False, True]
    for n in range(6):
        period, which = divmod(n, len(is_fading))
        first = sum(2 if fading else 1 for fading in is_fading[:which])
        layer_gains = [layers[f"sublayer_{first + i}"]["gain"][period] for i in range(2 if is_fading[which] else 1)]
        x = x * np.prod(layer_gains, axis=0) / (1 + n if is_fading[which] else 1)
        np.testing.assert_allclose(activations["layers"][n], x, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model.family": "one_way", "task": "masked_lm"},
            "one_way has no bidirectional form: use --config.task=ca",
        ),
        (
            {"model.family": "both_ways"},
            "both_ways has no causal form: use --config.task=masked_lm, or a",
        ),
        ({"model.pattern": ("free", "one_way"), "task": "masked_lm"}, "family=one_way has no bidirectional form"),
        (
            {"model.family": "one_way", "data.pack": "documents"},
            "one_way cannot separate packed documents: data.p",
        ),
        ({"model.family": "one_way"}, None),
        ({"model.family": "both_ways", "task": "masked_lm", "data.pack": "documents"}, None),
    ],
    ids=str,
)
def test_unsupported_uses_of_a_family_raise_errors(keys, message):
    config = get_config()
    config.update_from_flattened_dict({"model.vocab_size": VOCAB, **keys})
    if message is None:
        assert complete(parse(config).model)
        return
    with pytest.raises(InputError, match=message):
        complete(parse(config).model)
