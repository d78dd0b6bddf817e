"""`model.short_convolution`: sublayers with convolutions, and no parameter or state without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import sizes
from oracles.language_model import cross_entropy

from flash_lm import build_model
from flash_lm.errors import InputError
from flash_lm.layers.attention import ConvolvedState
from flash_lm.models.formats.llama import LLAMA
from flash_lm.models.formats.settings import write_problems
from models.cases import (
    BATCH,
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

pytestmark = pytest.mark.representatives("flash", causal_alone=True)

ON = {"short_convolution": 4}
FAMILIES = ("transformer_plus_plus", "flash", "aft_conv", "flash_quad", "mc_tfm", "performer", "aft_full")
FORMS = [(family, causal) for family in FAMILIES for causal in (True, False)]
RTOL = 1e-5
each = pytest.mark.parametrize("family", FAMILIES)


def convolved_case(family: str, causal: bool = True, **more) -> Case:
    return case(family, causal, **ON, **more)


@pytest.mark.parametrize(("family", "causal"), FORMS)
def test_it_equals_the_oracle(family, causal):
    """Logits of packed sequences, and gradients of all parameters along a random direction."""
    model, keep = convolved_case(family, causal), real_tokens(PACKED)
    logits, _, grads = model.run(PACKED)
    assert_close(logits[keep], model.oracle(PACKED)[keep], RTOL)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads["layers"]["sublayer_0"]["convolutions"]):
        assert np.linalg.norm(grad) > 1e-3, jax.tree_util.keystr(path)
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda g: rng.normal(size=g.shape) / max(np.linalg.norm(g), 1), grads)
    shares = jax.tree.leaves(jax.tree.map(lambda g, d: (g.astype(np.float64) * d).sum(), grads, direction))

    def loss(step):
        shifted_params = jax.tree.map(lambda p, d: p.astype(np.float64) + step * d, model.params, direction)
        return cross_entropy(model.oracle(PACKED, params=shifted_params), targets(), keep)

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    np.testing.assert_allclose(sum(shares), slope, rtol=0, atol=1e-5 * len(shares))


@pytest.mark.parametrize("family", ["transformer_plus_plus", "aft_conv", "linear_transformer"])
def test_with_silu(family):
    model = convolved_case(family, **{"convolution.activation": "silu"})
    logits = np.asarray(model.logits(model.params, tokens(), PACKED))
    assert_close(logits[real_tokens(PACKED)], model.oracle(PACKED)[real_tokens(PACKED)], RTOL)


@each
def test_prefill_from_anywhere_then_steps(family):
    """In parts of any size, also empty, each sequence from its position."""
    model, inputs = convolved_case(family), tokens()
    expected = np.asarray(model.logits(model.params, inputs))
    state, starts = model.init_state(), np.zeros(BATCH, int)
    for lengths in ((1, 2), (12, 0), (0, 16), (3, 1)):
        part = np.random.default_rng(7).integers(SHAPE["vocab_size"], size=(BATCH, LENGTH))
        for b, length in enumerate(lengths):
            part[b, :length] = inputs[b, starts[b] : starts[b] + length]
        logits, state = model.prefill(model.params, part, state, np.array(lengths))
        for b, length in enumerate(lengths):
            if length:
                assert_close(np.asarray(logits)[b, :length], expected[b, starts[b] : starts[b] + length], RTOL)
        starts += lengths
    layout = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    for _ in range(LENGTH - starts.max()):
        logits, state = model.step(model.params, inputs[np.arange(BATCH), starts], state)
        assert_close(logits, expected[np.arange(BATCH), starts], RTOL)
        starts += 1
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == layout


@each
def test_later_tokens_do_not_change_earlier_outputs(family):
    model, changed = convolved_case(family), tokens().copy()
    changed[:, 12:] = (changed[:, 12:] + 7) % SHAPE["vocab_size"]
    before, after = (np.asarray(model.logits(model.params, ids)) for ids in (tokens(), changed))
    np.testing.assert_array_equal(after[:, :12], before[:, :12])
    assert (np.abs(after[:, 12:] - before[:, 12:]).max(axis=-1) > 1e-3).all()


@pytest.mark.parametrize(("family", "causal"), FORMS)
def test_neighbours_and_padding_do_not_matter(family, causal):
    """A filter that crosses a border would leak into the first and last tokens of a document."""
    model, keep = convolved_case(family, causal), np.zeros((BATCH, LENGTH), bool)
    keep[0, 13:22], keep[1, :17] = True, True
    other = np.where(keep, tokens(), np.random.default_rng(6).integers(SHAPE["vocab_size"], size=keep.shape))
    one, two = (np.asarray(model.logits(model.params, ids, PACKED)) for ids in (tokens(), other))
    assert_close(two[keep], one[keep], 1e-6)


@pytest.mark.slow("compiles the gradients of another model of each family, unrolled")
@each
def test_scanned_equals_unrolled(family):
    expected, actual = convolved_case(family).run(PACKED), convolved_case(family, scan_layers=False).run(PACKED)
    assert_close(actual[0][real_tokens(PACKED)], expected[0][real_tokens(PACKED)], RTOL)
    assert actual[1] == pytest.approx(expected[1], rel=RTOL)


@pytest.mark.parametrize(("family", "causal"), [("flash", True), ("transformer_plus_plus", False)])
def test_it_starts_as_the_model_without(family, causal):
    """Each filter starts as the identity; without the key there is no parameter and no state."""
    build = lambda **keys: build_model(model_config(family, causal, **keys), rngs=nnx.Rngs(0))
    plain, model = build(), build(**ON)
    plain_layer, model_layer = (nnx.state(one, nnx.Param)["layers"]["sublayer_0"] for one in (plain, model))
    assert "convolutions" in model_layer and "convolutions" not in plain_layer
    compute_logits = nnx.jit(lambda model: model(tokens(), PACKED))
    np.testing.assert_allclose(compute_logits(model), compute_logits(plain), rtol=1e-5, atol=1e-6)
    if causal:
        without, with_ = (jax.eval_shape(lambda one=one: one.init_state(1)).layers[0] for one in (plain, model))
        assert isinstance(with_, ConvolvedState) and jax.tree.structure(with_.core) == jax.tree.structure(without)


def test_the_state_holds_the_last_inputs():
    """Three inputs per convolved channel of queries, keys and values; their dtype is that of other caches."""
    without, with_ = (case("linear_transformer", True, **keys) for keys in ({}, ON))
    more = state_bytes(with_.init_state()) - state_bytes(without.init_state())
    assert more == 4 * SHAPE["num_layers"] * BATCH * 3 * 3 * SHAPE["model_dim"]
    layers = case("linear_transformer", True, **ON, state_dtype="bfloat16").init_state().layers
    assert {x.dtype for x in layers[0].last.values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("length", [1, 3, 29])
@pytest.mark.parametrize(("family", "causal"), FORMS)
def test_parameters_and_flops_are_counted(family, causal, length):
    model = convolved_case(family, causal)
    assert sum(x.size for x in jax.tree.leaves(model.params)) == sizes.parameters(model.settings)
    flops = model.abstract.flops_per_token(length) * length
    assert flops == pytest.approx(sizes.flops(model.settings, length), rel=1e-9)


def test_shared_heads_of_keys():
    model = case("transformer_plus_plus", True, **ON, num_heads=4, num_kv_heads=2)
    logits = np.asarray(model.logits(model.params, tokens()))
    assert_close(logits, model.oracle(None), RTOL)
    assert sum(x.size for x in jax.tree.leaves(model.params)) == sizes.parameters(model.settings)


@pytest.mark.parametrize("taps", [1, -1, 65])
def test_invalid_numbers_of_taps(taps):
    with pytest.raises(InputError, match=r"model.short_convolution=.* must be 0 \(none\), or 2 to 64 taps"):
        build_model(model_config("flash", True, short_convolution=taps), rngs=nnx.Rngs(0))


def test_a_llama_has_no_short_convolution():
    problems = write_problems(LLAMA, case("transformer_plus_plus", True, **ON).config)
    assert any(problem.startswith("model.short_convolution=") for problem in problems)
