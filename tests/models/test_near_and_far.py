"""Conformer and Lite Transformer: kernels that differ by layer, other options, and what goes wrong elsewhere."""

import jax
import numpy as np
import pytest

from flash_lm.errors import InputError
from flash_lm.models.model_inputs import ModelInputs
from models.cases import BATCH, LENGTH, PACKED, SHAPE, Case, assert_close, case, tokens
from models.test_oracle import assert_logits_equal

ways = pytest.mark.parametrize(
    "causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["causal", "both-ways"]
)
each = pytest.mark.parametrize("which", ["conformer", "lite_transformer"])
FEW_ATTEND = {"num_heads": 4, "lite.attention_share": 0.25}


def without(model, sublayer: str, name: str) -> dict:
    """The parameters, with one kernel zero."""
    params = jax.tree.map(np.copy, model.params)
    params["layers"][sublayer][name]["kernel"][:] = 0
    return params


@ways
def test_kernels_differ_by_layer(causal):
    """Where attention is silent, a change reaches two tokens on in the first layer, and five more in the second."""
    model = case("lite_transformer", causal)
    params = without(model, "sublayer_0", "output")
    watch = jax.jit(lambda params, inputs: model.model(params).activations(lambda x: x, ModelInputs(inputs))["layers"])
    inputs, place = tokens(), 14
    inputs[:, place] = (inputs[:, place] + 1) % SHAPE["vocab_size"]
    moved_NxBxL = np.abs(watch(params, inputs) - watch(params, tokens())).max(axis=-1) > 1e-6
    reached = [np.flatnonzero(of_layer[0]) - place for of_layer in moved_NxBxL]
    # Three centred taps are at -1, 0 and 1; six are at -3 … 2, so a change reaches from -2 to 3.
    expected = [(0, 2), (0, 7)] if causal else [(-1, 1), (-3, 4)]
    for found, (first, last) in zip(reached, expected, strict=True):
        np.testing.assert_array_equal(found, np.arange(first, last + 1))


@pytest.mark.parametrize(
    "options", [{"lite.convolution": "light"}, pytest.param({}, marks=pytest.mark.slow)], ids=["light", "dynamic"]
)
@ways
def test_options_equal_the_oracle(causal, options):
    """Three heads of four convolve."""
    model = case("lite_transformer", causal, **FEW_ATTEND, **options)
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


@pytest.mark.slow
def test_a_pattern_counts_the_layers_on():
    """The second and the fourth layer convolve, with the second and the fourth kernel."""
    keys = {"num_layers": 4, "lite.kernels": (2, 3, 5, 4), "lite.convolution": "light"}
    model = case("lite_transformer", True, pattern=("transformer", "lite_transformer"), **keys)
    assert model.model(model.params).layers.sublayers[2].kernel[...].tolist() == [3, 4]
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


def test_shared_taps_decode():
    model = case("lite_transformer", True, **FEW_ATTEND, **{"lite.convolution": "light"})
    expected = np.asarray(model.logits(model.params, tokens()))
    lengths = np.array((19, 3))
    logits, state = model.prefill(model.params, tokens(), model.init_state(), lengths)
    assert_close(logits[1, :3], expected[1, :3], 1e-5)
    for i in range(4):
        places = lengths + i
        logits, state = model.step(model.params, tokens()[np.arange(BATCH), places], state)
        assert_close(logits, expected[np.arange(BATCH), places], 1e-5)


def test_the_state_is_as_long_as_the_widest_kernel_of_these_layers():
    model = case("lite_transformer", True, **{"lite.kernels": (3, 7, 15, 31)})
    assert jax.eval_shape(model.init_state).layers[0].last["short"].shape == (2, BATCH, 7 - 1, SHAPE["model_dim"] // 2)


@each
@ways
def test_rows_padding_and_length_do_not_move_a_row(which, causal):
    """Batch norms, and group norms over time, do (torchaudio#4205): here by another row, and by more padding."""
    model = case(which, causal)
    short = 13
    alone = np.asarray(model.logits(model.params, tokens()[:, :short], np.ones((BATCH, short), np.int32)))
    inputs = tokens()
    inputs[1] = inputs[1, ::-1] if causal else inputs[1]
    inputs[:, short:] = 7
    padded = np.ones((BATCH, LENGTH), np.int32)
    padded[:, short:] = 0
    assert_close(np.asarray(model.logits(model.params, inputs, padded))[0, :short], alone[0], 1e-6)


@pytest.mark.parametrize("silent", [(), ("sublayer_1",), ("sublayer_2",)], ids=["both", "convolution", "attention"])
def test_both_parts_of_a_causal_conformer_are_causal(silent):
    """Together and each alone, and each looks back: a public one has attention that is never causal (lucidrains)."""
    model = case("conformer", True)
    params, place, changed = model.params, 12, tokens()
    for sublayer in silent:
        params = without(model, sublayer, "output")
    changed[:, place] = (changed[:, place] + 1) % SHAPE["vocab_size"]
    before, after = (np.asarray(model.logits(params, ids, PACKED)) for ids in (tokens(), changed))
    np.testing.assert_array_equal(after[:, :place], before[:, :place])
    assert (np.abs(after - before)[1, place : place + 3].max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("lite_transformer", {"lite.kernels": ()}, "model.lite.kernels=.* positive integers"),
        ("lite_transformer", {"lite.kernels": (3, 0)}, "model.lite.kernels=.* positive integers"),
        ("lite_transformer", {"lite.attention_share": 1.0}, "more than 0 and less than 1"),
        ("lite_transformer", {"lite.attention_share": 0.1}, "model.num_heads=2 must leave a head or more"),
        ("lite_transformer", {"lite.convolution": "full"}, "one of dynamic, light"),
        ("conformer", {"conformer.kernel": 0}, "model.conformer.kernel=0"),
    ],
)
def test_keys_that_do_not_go_together(family, keys, message):
    with pytest.raises(InputError, match=message):
        Case(family, True, keys)


@pytest.mark.slow
def test_one_tap_is_enough():
    """No input is held, and the convolution is a product by channel."""
    model = case("conformer", True, **{"conformer.kernel": 1})
    logits, _ = model.prefill(model.params, tokens(), model.init_state(), np.array((LENGTH, 5)))
    assert_logits_equal(model, None, model.logits(model.params, tokens()))
    assert_close(np.asarray(logits)[0], model.oracle(None)[0], 1e-5)
