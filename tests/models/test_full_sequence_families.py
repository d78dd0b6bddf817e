"""Linformer and Nyströmformer, which mix full sequences: padding, short and long sequences, and unsupported uses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flash_lm
from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete
from flash_lm.models.model_inputs import ModelInputs
from models.cases import LENGTH, PACKED, PADDED, SHAPE, assert_close, case, model_config, tokens

FULL_SEQUENCE = [family for family, row in FAMILIES.items() if "packed" not in row.serves]
each_family = pytest.mark.parametrize("family", FULL_SEQUENCE)


def logits(model, inputs, segment_ids=None, params=None) -> np.ndarray:
    return np.asarray(model.logits(model.params if params is None else params, inputs, segment_ids))


@each_family
def test_padding_changes_nothing(family):
    """Padding enters the projections in fairseq's Linformer, and the landmarks in the authors' Nyströmformer."""
    model = case(family, False)
    for length in (22, 3):  # more and fewer than the landmarks
        segment_ids = np.where(np.arange(LENGTH)[None] < length, PADDED.clip(1, 1), 0)
        padded = logits(model, tokens(), segment_ids)[:, :length]
        assert_close(padded, logits(model, tokens()[:, :length]), 1e-5)


@each_family
def test_sequences_longer_than_max_length_raise_errors(family):
    model = case(family, False)
    with pytest.raises(ValueError, match="40 tokens exceed model.max_length=32"):
        logits(model, np.zeros((1, 40), np.int32))


def test_linformers_projections_limit_the_length():
    """With any absolute positions."""
    model = case("linformer", False, absolute_positions="sinusoid")
    with pytest.raises(ValueError, match="max_length"):
        logits(model, np.zeros((1, 40), np.int32))


def test_a_short_sequence_uses_the_first_columns_of_linformers_projections():
    """As in fairseq's code."""
    model = case("linformer", False)
    beyond_1xNx1 = 9 * (np.arange(SHAPE["max_length"]) >= 22).astype(np.float32)[None, :, None]
    changed = jax.tree_util.tree_map_with_path(
        lambda path, x: x + beyond_1xNx1 if "slots" in jax.tree_util.keystr(path) else x, model.params
    )
    before, after = (logits(model, tokens(), PADDED, params) for params in (model.params, changed))
    np.testing.assert_array_equal(after[0, :22], before[0, :22])
    assert np.abs(after[1] - before[1]).max() > 1e-2


@pytest.mark.parametrize("landmarks", [22, 29, 40])
def test_sequences_no_longer_than_the_landmarks_have_exact_softmax(landmarks):
    """A of fewer tokens than landmarks is singular. Sequence 0 has 22 tokens; the other one of the batch has more."""
    softmax = case("transformer", False)
    nystrom = case("nystromformer", False, **{"nystrom.kernel_size": 0, "nystrom.landmarks": landmarks})
    actual, expected = (logits(model, tokens(), PADDED, softmax.params) for model in (nystrom, softmax))
    assert_close(actual[0, :22], expected[0, :22], 1e-5)
    same = np.abs(actual[1] - expected[1]).max() < 1e-5 * np.abs(expected[1]).max()
    assert same == (landmarks >= LENGTH)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("linformer", {"linformer.share_slots": "kv", "rotary": True}),
        ("nystromformer", {"nystrom.kernel_size": 4, "nystrom.landmarks": 7, "nystrom.pinv_steps": 2, "rotary": True}),
        ("nystromformer", {"nystrom.landmarks": 1, "short_convolution": 3}),
        ("linformer", {"pattern": ("nystromformer", "flash", "linformer"), "num_layers": 3}),
    ],
)
def test_options_equal_the_oracle(family, options):
    model, keep = case(family, False, **options), PADDED > 0
    assert_close(logits(model, tokens(), PADDED)[keep], model.oracle(PADDED)[keep], 1e-5)


@each_family
def test_packed_documents_raise_errors(family):
    """An error outside jit; inside, NaN in that sequence, and only there."""
    model = case(family, False)
    outside_jit = model.model(model.params)
    late = np.array([[1] * LENGTH, [0] * 3 + [1] * (LENGTH - 3)])
    for segment_ids, row in ((PACKED, 0), (late, 1)):
        with pytest.raises(ValueError, match=f"row {row} has several documents, or padding before"):
            outside_jit(jnp.asarray(tokens()), jnp.asarray(segment_ids))
    actual = logits(model, tokens(), late)
    assert np.isfinite(actual[0]).all() and np.isnan(actual[1]).all()
    keys = {"model_dim": 8, "num_heads": 2, "max_length": 8}
    mixer = nnx.jit(lambda: flash_lm.build_mixer(family, **keys, rngs=nnx.Rngs(0)))()
    x_BxLxD = jnp.ones((1, 4, 8))
    assert np.isfinite(mixer(x_BxLxD, jnp.array([[1, 1, 1, 0]]))[:, :3]).all()
    with pytest.raises(ValueError, match="one document per sequence"):
        mixer(x_BxLxD, jnp.array([[1, 1, 2, 2]]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": "causal_lm"}, "has no causal form: use --config.task=masked_lm"),
        ({"task": "causal_lm", "model.pattern": ("transformer", "linformer")}, "linformer has no causal form"),
        ({"data.pack": "documents"}, "cannot separate packed documents: data.pack=documents must be stream"),
    ],
    ids=str,
)
@each_family
def test_unsupported_configs_raise_errors(family, keys, message):
    config = get_config()
    config.update_from_flattened_dict(
        {"task": "masked_lm", "model.family": family, "model.vocab_size": SHAPE["vocab_size"], **keys}
    )
    with pytest.raises(InputError, match=message):
        complete(parse(config).model)


@each_family
def test_an_open_objective_is_the_supported_one(family):
    config = model_config(family, False)
    config.causal = None
    model = nnx.eval_shape(lambda: flash_lm.build_model(config, rngs=nnx.Rngs(0)))
    assert model.config.causal is False


@each_family
def test_its_core_raises_errors_for_unsupported_contexts(family):
    """For custom models, in which no config check has run."""
    model = case(family, False).model(case(family, False).params)
    x_BxLxD, context = model.embed(ModelInputs(jnp.asarray(tokens()), jnp.asarray(PADDED)))
    sublayer = model.unstacked_blocks()[0].sublayers[0]
    for name in ("causal", "packed"):
        with pytest.raises(InputError, match="it needs a bidirectional context with one document per sequence"):
            sublayer(x_BxLxD, dataclasses.replace(context, **{name: True}))
