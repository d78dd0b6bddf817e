"""Any length: one token, less than a chunk, no multiple of a chunk, more than max_length where positions allow."""

import functools

import jax
import numpy as np
import pytest
from oracles import families as oracle_families

from flash_lm.models.model_inputs import ModelInputs
from models.cases import CASES, CAUSAL, PACKED, SHAPE, assert_close, assert_trees_close, case, standard_segment_ids

pytestmark = pytest.mark.representatives("flash")

ENDS = [name for name, row in oracle_families.FAMILIES.items() if row.absolute == "learned" or row.limits_length]
ROWS = {
    "one": np.ones((1, 1), np.int32),
    "below-a-chunk": np.array([[1, 1, 0, 2, 2]], np.int32),
    "above-max-length": np.array([[1] * 22 + [0] + [2] * 18], np.int32),
}


def draw_inputs(segment_ids: np.ndarray) -> np.ndarray:
    return np.random.default_rng(3).integers(SHAPE["vocab_size"], size=segment_ids.shape)


# Without segment ids some families use another bidirectional function.
@pytest.mark.parametrize(
    ("family", "causal", "packed"),
    [(*one, True) for one in CASES]
    + [(name, False, False) for name, row in oracle_families.FAMILIES.items() if row.without_segments],
)
@pytest.mark.parametrize("row", ROWS)
def test_length(family, causal, packed, row):
    model, segment_ids = case(family, causal), ROWS[row]
    if standard_segment_ids(family) is not PACKED:
        segment_ids = np.array([[1] * int((segment_ids > 0).sum()) + [0] * int((segment_ids == 0).sum())], np.int32)
    inputs = draw_inputs(segment_ids)
    keep = segment_ids > 0 if packed else np.ones_like(segment_ids, bool)
    segment_ids = segment_ids if packed else None
    if inputs.shape[1] > SHAPE["max_length"] and family in ENDS:
        with pytest.raises(ValueError, match="max_length"):
            model.logits(model.params, inputs, segment_ids)
        return
    expected = model.oracle(segment_ids, inputs)[keep]
    assert_close(np.asarray(model.logits(model.params, inputs, segment_ids))[keep], expected, 1e-5)


@pytest.mark.parametrize(("family", "causal"), [(family, causal) for family, causal in CASES if family in ENDS])
def test_the_longest_sequence_fits(family, causal):
    """The limit is max_length, not one less."""
    model = case(family, causal, max_length=29)
    inputs = draw_inputs(np.ones((1, 29)))
    assert_close(model.logits(model.params, inputs), model.oracle(None, inputs), 1e-5)


@pytest.mark.parametrize("family", [family for family in ENDS if family in CAUSAL])
def test_a_capacity_beyond_the_positions_is_refused(family):
    with pytest.raises(ValueError, match="max_length"):
        case(family, True).init_state(capacity=SHAPE["max_length"] + 1)


def test_options_change_the_length_limit():
    """The limit depends on the positions, not on the family."""
    with pytest.raises(ValueError, match="max_length"):
        case("flash", True, absolute_positions="learned").init_state(capacity=33)
    case("transformer", True, absolute_positions="sinusoid").init_state(capacity=33)
    case("flash_quad", True, **{"gau.relative_bias": "rope"}).init_state(capacity=33)


@pytest.mark.parametrize("family", [name for name, row in oracle_families.FAMILIES.items() if row.one_pass])
def test_one_document_per_sequence_and_padding(family):
    """`data.pack=stream` saves two of three passes; values and gradients are the same and ignore padding."""
    model = case(family, False)
    segment_ids = np.array([[1] * 29, [1] * 18 + [0] * 11, [0] * 29], np.int32)
    inputs, keep = draw_inputs(segment_ids), segment_ids > 0
    # A sum of squares would be constant after a norm.
    weights = np.random.default_rng(7).normal(size=(*keep.shape, SHAPE["model_dim"])).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="packed")
    def run(params, packed):
        def loss(params):
            features = model.model(params).features(ModelInputs(inputs, segment_ids, packed=packed))
            return (keep[..., None] * weights * features).sum(), features

        return jax.grad(loss, has_aux=True)(params)

    (one, features), (other, _) = (run(model.params, packed=packed) for packed in (False, True))
    logits = jax.jit(lambda params, x: model.model(params).logits(x))(model.params, features)
    assert_close(np.asarray(logits)[keep], model.oracle(segment_ids, inputs)[keep], 1e-5)
    assert_trees_close(jax.tree.map(np.asarray, one), jax.tree.map(np.asarray, other), 1e-5)
