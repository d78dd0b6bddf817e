"""Hybrid models: layers of different families, their decoding, and counts of parameters and FLOPs."""

import jax
import numpy as np
import pytest
from oracles import families as oracle_families
from oracles import sizes
from oracles.language_model import cross_entropy

from flash_lm.config.experiment import parse, parse_model
from flash_lm.config.mesh import MESH_AXES
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.families.family import complete, layer_configs
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.training.train_state import ModelFunction
from models.cases import (
    LENGTH,
    PACKED,
    SHAPE,
    Case,
    assert_close,
    case,
    model_config,
    real_tokens,
    state_bytes,
    targets,
    tokens,
)

pytestmark = pytest.mark.representatives("flash")

FLASH_AND_SOFTMAX = ("flash", "transformer_plus_plus")
KEYS = {"pattern": FLASH_AND_SOFTMAX, "num_layers": 4}
RTOL = 1e-5


def hybrid(causal: bool = True, **overrides) -> Case:
    return case("flash", causal, **KEYS, **overrides)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow("the bidirectional form"))])
@pytest.mark.parametrize(
    "family", ["flash", pytest.param("transformer", marks=pytest.mark.slow("another outer family"))]
)
def test_it_equals_the_oracle(family, causal):
    """Logits of packed sequences, and the derivative along a random direction in all parameters."""
    model = case(family, causal, **KEYS)
    logits, _, grads = model.run(PACKED)
    keep = real_tokens(PACKED)
    assert_close(logits[keep], model.oracle(PACKED)[keep], RTOL)
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda g: rng.normal(size=g.shape) / max(np.linalg.norm(g), 1), grads)
    shares = jax.tree.leaves(jax.tree.map(lambda g, d: (g.astype(np.float64) * d).sum(), grads, direction))

    def loss(step):
        shifted_params = jax.tree.map(lambda p, d: p.astype(np.float64) + step * d, model.params, direction)
        return cross_entropy(model.oracle(PACKED, params=shifted_params), targets(), keep)

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    np.testing.assert_allclose(sum(shares), slope, rtol=0, atol=1e-5 * len(shares))


def test_prefill_then_steps():
    """Also from different positions in a chunk; the state of chunked layers is constant, that of softmax grows."""
    model, expected = hybrid(), hybrid().oracle(None)
    inputs, positions = tokens(), np.array([13, 5])
    state = model.init_state()
    logits, state = model.prefill(model.params, inputs[:, :13], state, positions)
    for b, length in enumerate(positions):
        assert_close(np.asarray(logits)[b, :length], expected[b, :length], RTOL)
    for _ in range(LENGTH - positions.max()):
        logits, state = model.step(model.params, inputs[np.arange(2), positions], state)
        assert_close(logits, expected[np.arange(2), positions], RTOL)
        positions += 1
    states = [jax.eval_shape(lambda capacity=x: model.init_state(2, capacity)).layers for x in (16, 32)]
    chunked, growing = [state_bytes(x[:2]) for x in states], [state_bytes(x[2:]) for x in states]
    assert chunked[0] == chunked[1] and growing[1] > 1.5 * growing[0]


@pytest.mark.parametrize(
    "pattern",
    [
        ("gated_deltanet", "transformer_plus_plus"),
        pytest.param(("based", "longformer"), marks=pytest.mark.slow("compiles another pair")),
        pytest.param(("flash", "flash_quad"), marks=pytest.mark.slow("compiles another pair")),
    ],
    ids="-".join,
)
def test_pairs_of_the_presets_decode(pattern):
    """Convolutions, sums, ring buffers and caches in one model, each continued from its state."""
    model = case(pattern[0], True, pattern=pattern)
    expected, state, inputs = model.oracle(None), model.init_state(), tokens()
    logits, state = model.prefill(model.params, inputs[:, :13], state)
    assert_close(logits, expected[:, :13], RTOL)
    for position in range(13, LENGTH):
        logits, state = model.step(model.params, inputs[:, position], state)
        assert_close(logits, expected[:, position], RTOL)


@pytest.mark.slow("compiles an engine, and runs the oracle for every token")
def test_the_decode_loop_equals_greedy_decoding_with_the_oracle():
    model, prompt = hybrid(), tokens()[0, :11]
    mesh = jax.make_mesh((1, 1, 1), MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:1])
    allowed_V = np.ones(SHAPE["vocab_size"], bool)
    params = DecodeParams(ModelFunction(model.config, seed=0), model.params)
    engine = Engine(params, mesh, end=2, allowed_V=allowed_V)
    _, new = engine.advance(engine.prefill([prompt], 6), SamplingArrays.from_sampling(Sampling(temperature=0)), 0, 6)
    ids = prompt.tolist()
    for token in new.tokens_BxT[0, : new.lengths_B[0]].tolist():
        assert token == model.oracle(None, inputs=np.array([ids]))[0, -1].argmax()
        ids.append(token)
    assert len(ids) == 17 or bool(new.finished_B[0])
    assert len(ids) > 13


def test_parameters_and_flops_are_counted():
    model = hybrid()
    assert sum(x.size for x in jax.tree.leaves(model.params)) == sizes.parameters(model.settings)
    for length in (8, 29):
        flops = model.abstract.flops_per_token(length) * length
        assert flops == pytest.approx(sizes.flops(model.settings, length), rel=0.02)
    alone = [
        oracle_families.complete(model_config(family, True, num_layers=2).to_dict()) for family in FLASH_AND_SOFTMAX
    ]
    shared = sizes.flops(oracle_families.complete(model_config("flash", True, num_layers=0).to_dict()), 8)
    together = sum(sizes.flops(one, 8) - shared for one in alone) + shared
    assert sizes.flops(model.settings, 8) == pytest.approx(together, rel=1e-9)


def test_a_pattern_of_one_family_is_that_family():
    """Scanned over periods of two layers or over layers: the same parameters with other names."""
    plain, doubled = case("flash", True), case("flash", True, pattern=("flash", "flash"))
    layers = {}
    for name, x in plain.params["layers"].items():
        norm, _, i = name.rpartition("sublayer_")
        for which in (0, 1):
            layers[f"{norm}sublayer_{2 * which + int(i)}"] = jax.tree.map(lambda leaf, w=which: leaf[w : w + 1], x)
    params = plain.params | {"layers": layers}
    assert jax.tree.structure(params) == jax.tree.structure(doubled.params)
    logits = doubled.logits(params, tokens())
    assert_close(logits, plain.logits(plain.params, tokens()), 1e-6)


def test_each_layer_has_the_keys_of_its_family():
    config = complete(parse_model(model_config("flash", False, **KEYS, max_length=600)))
    flash, softmax = layer_configs(config)
    assert (flash.norm, softmax.norm) == ("scale", "scale")  # shared by the model
    assert (flash.absolute_positions, softmax.absolute_positions) == ("scaled_sinusoid",) * 2
    assert (softmax.mlp_dim, flash.mlp_dim) == (88, None) and flash.get("gau.expanded_dim") == 64
    assert (flash.rotary, softmax.rotary) == (True, True) and config.mlp_dim is None
    assert (flash.residual_init, softmax.residual_init) == ("as_init", "depth")
    by_hand = complete(parse_model(model_config("flash", True, **KEYS, mlp_dim=40, rotary=False)))
    assert [(one.mlp_dim, one.rotary) for one in layer_configs(by_hand)] == [(40, False)] * 2


@pytest.mark.slow("compiles the gradients of a model of four layers twice more")
@pytest.mark.parametrize("keys", [{"scan_layers": False}, {"remat": "full"}], ids=str)
def test_unrolled_and_recomputed_are_the_same(keys):
    expected = hybrid().run(PACKED)
    for actual, reference in zip(hybrid(**keys).run(PACKED)[:2], expected[:2], strict=True):
        assert_close(actual, reference, RTOL)


def test_rotary_layers_mix_with_layers_without():
    """Rotary widths differ between the families, and the Linear Transformer has none."""
    model = case("transformer", True, pattern=("flash", "transformer_plus", "linear_transformer"), num_layers=3)
    assert {one.rotary_width for one in model.model(model.params).layers.sublayers} == {8, 16, None}
    assert_close(model.logits(model.params, tokens()), model.oracle(None), RTOL)


def test_activations_of_each_layer():
    model = hybrid()
    read = jax.jit(lambda params: model.model(params).activations(lambda x: x, ModelInputs(tokens())))
    activations = jax.device_get(read(model.params))
    assert activations["layers"].shape == (4, 2, LENGTH, 32)
    norm = jax.jit(lambda params, x: model.model(params).norm(x))
    np.testing.assert_array_equal(norm(model.params, activations["layers"][-1]), activations["norm"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"pattern": ("flash", "nothing")},
            "model.pattern=.* must be a tuple of names of families: tra",
        ),
        ({"pattern": FLASH_AND_SOFTMAX, "num_layers": 3}, "num_layers=3 must be a multiple of the 2 layers of model.p"),
        ({"pattern": FLASH_AND_SOFTMAX, "num_heads": 5}, "model_dim=128 must be a multiple of model.num_heads=5"),
    ],
)
def test_an_impossible_pattern_is_refused(keys, message):
    config = get_config()
    config.model.update(vocab_size=64, **keys)
    with pytest.raises(InputError, match=message):
        complete(parse(config).model)


def test_models_that_cannot_decode_raise_errors():
    config = model_config("flash", True, **KEYS, normalizer="length")
    with pytest.raises(InputError, match="normalizer"):
        Case("flash", True, {**KEYS, "normalizer": "length"}).init_state()
    assert complete(parse_model(config)).label == "flash/transformer_plus_plus"
