"""Conformer and Lite Transformer: kernels that differ by layer, other options, and bugs of other code."""

import jax
import numpy as np
import pytest

from flash_lm.errors import InputError
from flash_lm.models.model_inputs import ModelInputs
from models.cases import BATCH, LENGTH, PACKED, SHAPE, Case, assert_close, case, tokens
from models.test_oracle import assert_logits_equal

ways = pytest.mark.parametrize(
    "causal",
    [True, pytest.param(False, marks=pytest.mark.slow("compiles another model: the same code with centred filters"))],
    ids=["causal", "both-ways"],
)
each = pytest.mark.parametrize("which", ["conformer", "lite_transformer"])
FEW_ATTEND = {"num_heads": 4, "lite.attention_share": 0.25}


def zero_kernel(model, sublayer: str, name: str) -> dict:
    """Returns the parameters with one kernel set to zero."""
    params = jax.tree.map(np.copy, model.params)
    params["layers"][sublayer][name]["kernel"][:] = 0
    return params


@ways
def test_kernels_differ_by_layer(causal):
    """With attention zeroed, a change reaches two tokens further in the first layer, and five more in the second."""
    model = case("lite_transformer", causal)
    params = zero_kernel(model, "sublayer_0", "output")
    watch = jax.jit(lambda params, inputs: model.model(params).activations(lambda x: x, ModelInputs(inputs))["layers"])
    inputs, position = tokens(), 14
    inputs[:, position] = (inputs[:, position] + 1) % SHAPE["vocab_size"]
    moved_NxBxL = np.abs(watch(params, inputs) - watch(params, tokens())).max(axis=-1) > 1e-6
    reached = [np.flatnonzero(layer_moved[0]) - position for layer_moved in moved_NxBxL]
    # Three centred taps are at -1, 0 and 1; six are at -3 … 2, so a change reaches from -2 to 3.
    expected = [(0, 2), (0, 7)] if causal else [(-1, 1), (-3, 4)]
    for offsets, (first, last) in zip(reached, expected, strict=True):
        np.testing.assert_array_equal(offsets, np.arange(first, last + 1))


@pytest.mark.parametrize(
    "options",
    [
        {"lite.convolution": "light"},
        pytest.param(
            {}, marks=pytest.mark.slow("compiles another model: dynamic convolutions are those of test_oracle.py")
        ),
    ],
    ids=["light", "dynamic"],
)
@ways
def test_options_equal_the_oracle(causal, options):
    """Three of four heads are convolutions."""
    model = case("lite_transformer", causal, **FEW_ATTEND, **options)
    assert_logits_equal(model, PACKED, model.logits(model.params, tokens(), PACKED))


@pytest.mark.slow("compiles a model of four layers, and others have patterns, too")
def test_a_pattern_numbers_layers_through_the_model():
    """The second and fourth layer are convolutions, with the second and fourth kernel size."""
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
        positions = lengths + i
        logits, state = model.step(model.params, tokens()[np.arange(BATCH), positions], state)
        assert_close(logits, expected[np.arange(BATCH), positions], 1e-5)


def test_the_state_is_as_long_as_the_widest_kernel_of_these_layers():
    model = case("lite_transformer", True, **{"lite.kernels": (3, 7, 15, 31)})
    assert jax.eval_shape(model.init_state).layers[0].last["short"].shape == (2, BATCH, 7 - 1, SHAPE["model_dim"] // 2)


@each
@ways
def test_other_sequences_and_padding_do_not_change_a_sequence(which, causal):
    """Batch norms and group norms over time mix sequences and padding (torchaudio#4205)."""
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
    """Together and each alone, and each sees the past: attention is never causal in lucidrains' code."""
    model = case("conformer", True)
    params, position, changed = model.params, 12, tokens()
    for sublayer in silent:
        params = zero_kernel(model, sublayer, "output")
    changed[:, position] = (changed[:, position] + 1) % SHAPE["vocab_size"]
    before, after = (np.asarray(model.logits(params, ids, PACKED)) for ids in (tokens(), changed))
    np.testing.assert_array_equal(after[:, :position], before[:, :position])
    assert (np.abs(after - before)[1, position : position + 3].max(axis=-1) > 1e-4).all()


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
def test_incompatible_keys(family, keys, message):
    with pytest.raises(InputError, match=message):
        Case(family, True, keys)


@pytest.mark.slow("compiles a model and a prefill for one size of the kernel")
def test_one_tap_is_enough():
    """The state holds no input, and the convolution is a product per channel."""
    model = case("conformer", True, **{"conformer.kernel": 1})
    logits, _ = model.prefill(model.params, tokens(), model.init_state(), np.array((LENGTH, 5)))
    assert_logits_equal(model, None, model.logits(model.params, tokens()))
    assert_close(np.asarray(logits)[0], model.oracle(None)[0], 1e-5)
